//! Tools that cargo installs into the target directory, at versions that are known to work.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{self, Result};
use crate::workspace::{root, target_directory};

/// A program that crates.io provides.
pub struct Tool {
    /// The name of the crate and of its program.
    pub name: &'static str,
    /// The version that is installed.
    pub version: &'static str,
    /// The profile with which it is compiled. `dev`: the tools run for seconds, and compile for minutes.
    pub profile: &'static str,
}

/// Checks licences, sources, duplicates and advisories.
pub const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", profile: "dev" };
/// Prints the public interface as text. This version must read the JSON of the pinned toolchain's
/// rustdoc.
pub const PUBLIC_API: Tool = Tool { name: "cargo-public-api", version: "0.52.0", profile: "dev" };
/// Changes a program in places where a test should notice.
pub const MUTANTS: Tool = Tool { name: "cargo-mutants", version: "27.1.0", profile: "dev" };

/// Writes the header of the C interface. Another version writes another text.
pub const CBINDGEN: Tool = Tool { name: "cbindgen", version: "0.29.4", profile: "dev" };

/// The path of the tool, which is built first if necessary. The error text explains why it is
/// unavailable.
pub fn installed(tool: &Tool) -> Result<PathBuf> {
    let place = target_directory().join("tools").join(format!("{}-{}", tool.name, tool.version));
    let program = place.join("bin").join(tool.name);
    if program.is_file() {
        return Ok(program);
    }
    println!("installing {} {}", tool.name, tool.version);
    let mut command = process::cargo();
    command.args(["install", "--quiet", "--locked", "--version", tool.version, "--root"]).arg(&place);
    command.args(["--profile", tool.profile]);
    command.arg("--target-dir").arg(target_directory().join("tools/build")).arg(tool.name);
    process::run(&mut command)
        .map_err(|why| format!("{} {} cannot be installed: {why}", tool.name, tool.version))?;
    Ok(program)
}

/// A call of a tool in the workspace.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_PKG_NAME");
    command
}

/// Installs this version of Rust with rustup, or explains why that is impossible.
pub fn toolchain(version: &str) -> Result<()> {
    let mut ask = Command::new("rustc");
    ask.env_remove("RUSTUP_TOOLCHAIN").args([&format!("+{version}"), "--version"]);
    if process::succeeds(&mut ask) {
        return Ok(());
    }
    if !process::installed("rustup") {
        return Err(format!("there is no rustup to install Rust {version} with"));
    }
    let mut install = Command::new("rustup");
    install.args(["toolchain", "install", version, "--profile", "minimal", "--no-self-update"]);
    process::run(&mut install).map_err(|why| format!("Rust {version} cannot be installed: {why}"))
}
