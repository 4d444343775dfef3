//! Runs other programs with inherited output, and reports a failure in one sentence.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

/// The reason why a command of xtask failed.
#[derive(Debug)]
pub enum Failure {
    /// The arguments were wrong.
    Usage(String),
    /// A step of the command failed.
    Failed(String),
}

/// The result of a step; the error text names what failed.
pub type Result<T> = std::result::Result<T, String>;

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::workspace::root());
    // The outer `cargo run` sets these variables, and they are wrong for another package.
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_PKG_NAME");
    command
}

/// Runs `command` with inherited standard output and error. An exit status other than 0 is an
/// error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("cannot start {}: {error}", name(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` ended with {status}", line(command))) }
}

/// Runs `command` and returns its standard output.
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

/// Whether `command` runs and succeeds; its output is discarded.
pub fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether a program of that name is installed, in the PATH or in root's usual PATH.
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
