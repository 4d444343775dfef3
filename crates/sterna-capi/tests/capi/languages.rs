//! Go over cgo and Python over cffi call the installed library.

use std::path::PathBuf;
use std::process::Command;

use crate::installed::{self, crate_directory, exists, run};

#[test]
fn go_saves_and_restores_a_guest() {
    let test = "go_saves_and_restores_a_guest";
    let Some(installed) = installed::or_skip(test) else { return };
    if !exists("go") {
        eprintln!("SKIPPED {test}: there is no go; `cargo xtask setup` installs it");
        return;
    }
    let home = tempfile::tempdir().expect("a directory");
    let program = home.path().join("save-restore");
    let mut build = Command::new("go");
    let include = format!("-I{}", installed.include().display());
    let library = format!("-L{} -lsterna", installed.lib().display());
    // The cache is kept, because cgo's own packages take longer than the program. No module is fetched.
    let cache = std::env::current_exe().expect("this program").with_file_name("go-cache");
    build.env("GOCACHE", cache).env("GOPROXY", "off").env("GOTOOLCHAIN", "local").env("GOFLAGS", "-mod=mod");
    build.env("CGO_ENABLED", "1").env("CGO_CFLAGS", include).env("CGO_LDFLAGS", library);
    run(build.current_dir(programs().join("go")).args(["build", "-o"]).arg(&program).arg("."));

    let text = run(installed.visible_to(&mut Command::new(program)).arg(home.path().join("vm.img")));

    assert_eq!(text.lines().last(), Some("restored: device 4711, 1024 pages"), "{text}");
}

#[test]
fn python_migrates_a_guest_between_two_handles() {
    let test = "python_migrates_a_guest_between_two_handles";
    let Some(installed) = installed::or_skip(test) else { return };
    let Some(python) = python() else {
        eprintln!("SKIPPED {test}: there is no Python with cffi; `cargo xtask setup` installs it");
        return;
    };
    let mut script = Command::new(python);
    script.arg(programs().join("python/migrate.py")).arg(installed.header()).arg(installed.library());

    let text = run(&mut script);

    assert_eq!(text.lines().last(), Some("arrived: device 4711, 1024 pages"), "{text}");
}

fn programs() -> PathBuf {
    crate_directory().join("tests/programs")
}

/// A Python that has cffi: the first on the PATH, or Debian's.
fn python() -> Option<&'static str> {
    let has_cffi = |python: &&str| {
        let asked = Command::new(python).args(["-c", "import cffi"]).output();
        asked.is_ok_and(|asked| asked.status.success())
    };
    ["python3", "/usr/bin/python3"].into_iter().find(has_cffi)
}
