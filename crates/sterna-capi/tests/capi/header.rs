//! `sterna.h` and the symbols of the library are what the sources declare.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::path::PathBuf;
use std::process::Command;

use crate::installed::{self, crate_directory, exists, run};

/// The version that wrote the header. `cargo xtask setup` installs it.
const CBINDGEN: &str = "cbindgen-0.29.4";

#[test]
fn header_is_what_cbindgen_writes() {
    let Some(cbindgen) = cbindgen() else {
        eprintln!(
            "SKIPPED header_is_what_cbindgen_writes: there is no cbindgen; `cargo xtask setup` installs it"
        );
        return;
    };
    let mut command = Command::new(cbindgen);
    let written =
        run(command.current_dir(crate_directory()).args(["--quiet", "--config", "cbindgen.toml", "."]));
    let file = crate_directory().join("sterna.h");
    if std::env::var_os("STERNA_BLESS").is_some() {
        std::fs::write(&file, &written).expect("written");
    }

    let committed = std::fs::read_to_string(&file).expect("a header");

    assert!(committed == written, "sterna.h differs from the sources: run this test with STERNA_BLESS=1");
}

#[test]
fn header_declares_every_function_of_the_sources_and_no_other() {
    assert_eq!(declared(), exported());
    assert!(declared().len() > 40, "{:?}", declared());
}

#[test]
fn header_has_the_version_of_the_crate() {
    let header = std::fs::read_to_string(crate_directory().join("sterna.h")).expect("a header");
    let library = unsafe_text(sterna_capi::sterna_version());

    assert!(header.contains(&format!("#define STERNA_VERSION \"{}\"\n", env!("CARGO_PKG_VERSION"))));
    assert_eq!(library, env!("CARGO_PKG_VERSION"));
}

#[test]
fn library_exports_the_functions_under_their_version_and_nothing_else() {
    let Some(installed) =
        installed::or_skip("library_exports_the_functions_under_their_version_and_nothing_else")
    else {
        return;
    };
    let path = CString::new(installed.library().to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: the library's initialisers are those of Rust's and C's run time.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null());

    for name in exported() {
        let symbol = CString::new(name.clone()).expect("no NUL");
        // SAFETY: the handle is open, and both are texts.
        let found = unsafe { libc::dlvsym(library, symbol.as_ptr(), c"STERNA_0.1".as_ptr()) };
        assert!(!found.is_null(), "{name}@@STERNA_0.1");
    }
    for foreign in [c"rust_eh_personality", c"ZSTD_compress"] {
        // SAFETY: as above.
        assert!(unsafe { libc::dlsym(library, foreign.as_ptr()) }.is_null(), "{foreign:?} is exported");
    }
}

#[test]
fn header_is_valid_c_and_cxx() {
    let Some(installed) = installed::or_skip("header_is_valid_c_and_cxx") else { return };
    for (compiler, language) in [("cc", "c"), ("c++", "c++")] {
        if !exists(compiler) {
            eprintln!("SKIPPED header_is_valid_c_and_cxx: there is no {compiler}");
            continue;
        }
        let mut command = Command::new(compiler);
        run(command
            .args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", language])
            .arg(installed.header()));
    }
}

#[test]
fn code_of_the_guide_compiles() {
    let Some(installed) = installed::or_skip("code_of_the_guide_compiles") else { return };
    let guide = std::fs::read_to_string(crate_directory().join("../../docs/c-api.md")).expect("a guide");
    let blocks = guide.split("\n```c\n").skip(1).map(|rest| rest.split("\n```\n").next().expect("an end"));
    let code = blocks.collect::<Vec<_>>().join("\n");
    assert!(code.contains("sterna_incoming_listen_with"), "{code}");
    let home = tempfile::tempdir().expect("a directory");
    std::fs::write(home.path().join("guide.c"), format!("{code}\n")).expect("written");

    let mut command = Command::new("cc");
    command
        .args(["-fsyntax-only", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(installed.include());
    run(command.arg(home.path().join("guide.c")));
}

fn cbindgen() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    // …/target/debug/deps/capi: the tools of xtask are in …/target/tools.
    let own = program.ancestors().nth(3)?.join("tools").join(CBINDGEN).join("bin/cbindgen");
    let named = std::env::var_os("STERNA_CBINDGEN").map(PathBuf::from);
    named.or_else(|| own.is_file().then_some(own))
}

/// Names of the functions in the header.
fn declared() -> BTreeSet<String> {
    let text = std::fs::read_to_string(crate_directory().join("sterna.h")).expect("a header");
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//") && !line.starts_with(' '));
    let names = code.filter_map(|line| line.split_once('(')?.0.split([' ', '*']).next_back());
    names.filter(|name| name.starts_with("sterna_")).map(str::to_owned).collect()
}

/// Names of the functions in the sources.
fn exported() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(crate_directory().join("src")).expect("sources") {
        let text = std::fs::read_to_string(entry.expect("a file").path()).expect("a text");
        let functions = text.split("#[unsafe(no_mangle)]\n").skip(1);
        names.extend(functions.map(|function| {
            let name = function.split_once("fn ").and_then(|(_, rest)| rest.split('(').next());
            name.expect("a function").to_owned()
        }));
    }
    names
}

fn unsafe_text(text: *const std::ffi::c_char) -> String {
    // SAFETY: a static text of the library.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_str().expect("UTF-8").to_owned()
}
