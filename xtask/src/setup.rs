//! What a fresh Debian 12 machine with Rust lacks: installed when needed, and only as root with apt-get.

use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};

/// A program that some part needs and the Debian package that brings it.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// Looked for on the PATH, or an absolute path.
    pub program: &'static str,
    /// Installed if it is not there.
    pub package: &'static str,
}

/// For building: zstd is C.
pub const C_COMPILER: Tool = Tool { program: "cc", package: "gcc" };
/// For libFuzzer's runtime.
pub const CXX_COMPILER: Tool = Tool { program: "c++", package: "g++" };
/// For a test that drives our control socket with PyPI's qemu.qmp.
pub const PYTHON: Tool = Tool { program: "python3", package: "python3-venv" };
/// For the test that compares Rust's structures of RDMA with C's. Nothing that is built needs them.
pub const RDMA_HEADERS: [Tool; 2] = [
    Tool { program: "/usr/include/infiniband/verbs.h", package: "libibverbs-dev" },
    Tool { program: "/usr/include/rdma/rdma_cma.h", package: "librdmacm-dev" },
];

/// `cargo xtask setup`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(extra) = arguments.first() {
        return Err(Failure::Usage(format!("setup takes no `{extra}`")));
    }
    let mut parts = Parts::default();
    parts.part("setup", everything);
    parts.finish()
}

/// Installs what any part of the tests needs; what cannot be installed is said and left to the parts.
pub fn everything() -> Result<Outcome> {
    rust_components()?;
    let mut lacking = Vec::new();
    for tools in
        [&[C_COMPILER, CXX_COMPILER, PYTHON][..], crate::lab::TOOLS, &[crate::roots::BUILDER], &RDMA_HEADERS]
    {
        if let Err(why) = ensure(tools) {
            println!("{why}");
            lacking.push(why);
        }
    }
    if process::installed(C_COMPILER.program) { Ok(Outcome::Passed) } else { Err(lacking.join("; ")) }
}

/// Makes all of `tools` available, or says which are not and why.
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
    // A fresh image has no package lists; fetch them only if it is so.
    if apt(&install).is_err() {
        apt(&["update"])?;
        apt(&install)?;
    }
    match missing.iter().find(|tool| !process::installed(tool.program)) {
        Some(tool) => Err(format!("{} did not bring {}", tool.package, tool.program)),
        None => Ok(()),
    }
}

/// Fetches apt's package lists if they do not know `package`; without root or apt-get nothing is done.
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

/// Formatter and linter; rust-toolchain.toml names them, but an installation without rustup may lack them.
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
    // No libc here: the kernel says it. Second number of `Uid:` is the effective one.
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:"))
            .and_then(|ids| ids.split_whitespace().nth(1))
            .is_some_and(|id| id == "0")
    })
}
