//! Installs the packages that a fresh Debian 12 machine with Rust lacks, if this runs as root and
//! apt-get exists.

use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::release::tools;

/// A program that a part needs, and the Debian package that contains it.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// The name on the PATH, or an absolute path.
    pub program: &'static str,
    /// The package that is installed if the program is missing.
    pub package: &'static str,
}

/// Needed to build zstd, which is C.
pub const C_COMPILER: Tool = Tool { program: "cc", package: "gcc" };
/// Needed to build libFuzzer's runtime.
pub const CXX_COMPILER: Tool = Tool { program: "c++", package: "g++" };
/// Needed for a test that drives the control socket with PyPI's qemu.qmp.
pub const PYTHON: Tool = Tool { program: "python3", package: "python3-venv" };
/// Needed for tests that call the C interface from Go and Python, and that build against its pkg-config file.
pub const CALLERS_OF_C: [Tool; 3] = [
    Tool { program: "go", package: "golang-go" },
    Tool { program: "/usr/lib/python3/dist-packages/cffi/__init__.py", package: "python3-cffi" },
    Tool { program: "pkg-config", package: "pkg-config" },
];
/// Needed for the test that compares Rust's RDMA structures with those in C. The build does not
/// need them.
pub const RDMA_HEADERS: [Tool; 2] = [
    Tool { program: "/usr/include/infiniband/verbs.h", package: "libibverbs-dev" },
    Tool { program: "/usr/include/rdma/rdma_cma.h", package: "librdmacm-dev" },
];

/// Installs everything: `cargo xtask setup`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(extra) = arguments.first() {
        return Err(Failure::Usage(format!("setup takes no `{extra}`")));
    }
    let mut parts = Parts::default();
    parts.part("setup", everything);
    parts.finish()
}

/// Installs the programs that any part of the tests needs. Reports missing ones; the parts that
/// need them are skipped.
pub fn everything() -> Result<Outcome> {
    rust_components()?;
    let mut lacking = Vec::new();
    for tools in [
        &[C_COMPILER, CXX_COMPILER, PYTHON][..],
        crate::lab::TOOLS,
        &[crate::roots::BUILDER],
        &RDMA_HEADERS,
        &CALLERS_OF_C,
    ] {
        if let Err(why) = ensure(tools) {
            println!("{why}");
            lacking.push(why);
        }
    }
    // A test compares the header of the C interface with its output.
    if let Err(why) = tools::installed(&tools::CBINDGEN) {
        println!("{why}");
        lacking.push(why);
    }
    if process::installed(C_COMPILER.program) { Ok(Outcome::Passed) } else { Err(lacking.join("; ")) }
}

/// Makes all of `tools` available, or returns which are missing and why.
pub fn ensure(tools: &[Tool]) -> Result<()> {
    let missing: Vec<&Tool> = tools.iter().filter(|tool| !process::installed(tool.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    let packages_text = packages.join(" ");
    if !is_root() {
        return Err(format!("not root: install by hand `apt-get install {packages_text}`"));
    }
    if !process::installed("apt-get") {
        return Err(format!("no apt-get here: install what Debian calls {packages_text}"));
    }
    println!("installing {packages_text}");
    let mut install = vec!["install", "--no-install-recommends"];
    install.extend(&packages);
    // A fresh image has no package lists. They are fetched only if the first attempt fails.
    if apt(&install).is_err() {
        apt(&["update"])?;
        apt(&install)?;
    }
    match missing.iter().find(|tool| !process::installed(tool.program)) {
        Some(tool) => Err(format!("{} did not bring {}", tool.package, tool.program)),
        None => Ok(()),
    }
}

/// Fetches apt's package lists if they do not contain `package`. Does nothing without root or
/// apt-get.
pub fn package_lists(package: &str) -> Result<()> {
    let known = process::succeeds(Command::new("apt-cache").args(["show", package]));
    if known || !is_root() || !process::installed("apt-get") { Ok(()) } else { apt(&["update"]) }
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["-q", "-y", "-o", "Dpkg::Use-Pty=0"]).args(arguments);
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(std::process::Stdio::null());
    process::output(&mut command).map(drop)
}

/// Installs the formatter and the linter.
///
/// rust-toolchain.toml names them, but an installation without rustup may lack them.
fn rust_components() -> Result<()> {
    for component in ["fmt", "clippy"] {
        if !process::succeeds(process::cargo().args([component, "--version"])) {
            let name = if component == "fmt" { "rustfmt" } else { component };
            println!("adding {name}");
            process::run(Command::new("rustup").args(["component", "add", name]))
                .map_err(|why| format!("cargo {component} is missing and cannot be added: {why}"))?;
        }
    }
    Ok(())
}

fn is_root() -> bool {
    // No libc is available here, so the kernel's text is read. The second number of `Uid:` is the
    // effective id.
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:"))
            .and_then(|ids| ids.split_whitespace().nth(1))
            .is_some_and(|id| id == "0")
    })
}
