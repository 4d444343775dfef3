//! The `sterna` command that these tests run.

use std::ffi::OsStr;
use std::process::Command;

use crate::Failure;

/// The `sterna` command (the program `sterna-under-test`, which cargo builds before this crate's tests).
///
/// # Panics
/// If the program is not in the test's directory or its parent.
pub fn sterna() -> Command {
    let exe = std::env::current_exe().expect("a running program has a path");
    let program = exe
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("sterna-under-test"))
        .find(|program| program.is_file())
        .expect("cargo builds sterna-under-test beside the tests of sterna-interop");
    Command::new(program)
}

/// Runs the `sterna` command and returns its standard output.
///
/// # Errors
/// The exit status and the error message of the command.
pub fn sterna_does<S: AsRef<OsStr>>(arguments: &[S]) -> Result<String, Failure> {
    let output = sterna().args(arguments).output().map_err(|error| format!("sterna: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let line: Vec<_> = arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("sterna {}: {}: {why}", line.join(" "), output.status))
}
