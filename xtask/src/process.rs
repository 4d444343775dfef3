//! Running other programs: inherited output, one clear sentence when one fails.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

/// Why a command of xtask did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// It was called wrongly.
    Usage(String),
    /// What it did went wrong.
    Failed(String),
}

/// What a step gives back; the text says what failed.
pub type Result<T> = std::result::Result<T, String>;

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::workspace::root());
    // Set by the outer `cargo run` for this package alone.
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_PKG_NAME");
    command
}

/// Runs `command` with our own standard output and error; an exit status other than 0 is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("cannot start {}: {error}", name(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` ended with {status}", line(command))) }
}

/// Runs `command` and gives back its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start {}: {error}", name(command)))?;
    if !output.status.success() {
        return Err(format!("`{}` ended with {}", line(command), output.status));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("`{}` printed no UTF-8", line(command)))
}

/// Whether `command` runs and succeeds; its output goes nowhere.
pub fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether a program of that name is on the PATH (or in a directory that root's PATH usually has).
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| Path::new(&directory).join(program).is_file())
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    std::iter::once(program)
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_of_a_failing_program_names_the_program_and_its_status() {
        let error = run(Command::new("sh").args(["-c", "exit 7"])).unwrap_err();

        assert!(error.contains("sh -c exit 7") && error.contains('7'), "{error}");
    }
}
