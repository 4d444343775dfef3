//! Running other programs: inherited output, one clear sentence when one fails.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
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

/// A program of the workspace as the tests build it. Built with all targets at once: a package alone would
/// be built with other features, and everything below it a second time.
pub fn program(name: &str) -> Result<Command> {
    run(cargo().args(["build", "--quiet", "--workspace", "--all-targets"]))?;
    Ok(Command::new(crate::workspace::target_directory().join("debug").join(name)))
}

/// Runs `command` with our own standard output and error; an exit status other than 0 is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("cannot start {}: {error}", name(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` ended with {status}", line(command))) }
}

/// Runs `command`, shows its standard error as it comes and gives back the lines of it that begin with
/// `prefix`. Tests say `SKIPPED name: reason` there.
pub fn run_and_watch(command: &mut Command, prefix: &str) -> (Result<()>, Vec<String>) {
    let mut child = match command.stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return (Err(format!("cannot start {}: {error}", name(command))), Vec::new()),
    };
    let mut found = Vec::new();
    let stderr = child.stderr.take().expect("asked for above");
    for bytes in BufReader::new(stderr).split(b'\n').map_while(std::result::Result::ok) {
        let text = String::from_utf8_lossy(&bytes);
        let _ = writeln!(std::io::stderr(), "{text}");
        // A test's line may follow libtest's own unfinished one.
        if let Some(at) = text.find(prefix) {
            found.push(text[at..].trim_end().to_owned());
        }
    }
    let done = match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{}` ended with {status}", line(command))),
        Err(error) => Err(format!("cannot wait for {}: {error}", name(command))),
    };
    (done, found)
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

    #[test]
    fn run_and_watch_finds_marked_lines_even_behind_others() {
        let script = "echo 'MARKED a: no b' >&2; echo 'test x ... MARKED c: d' >&2; echo other >&2";

        let (done, found) = run_and_watch(Command::new("sh").args(["-c", script]), "MARKED ");

        assert_eq!(done, Ok(()));
        assert_eq!(found, ["MARKED a: no b", "MARKED c: d"]);
    }
}
