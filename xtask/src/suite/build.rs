//! The one build of every program of the workspace with its tests. A test starts as soon as its
//! program is linked. A test that calls programs of its package waits until these are linked too,
//! because cargo links in any order.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::binary::package_of;
use super::{Binary, Job, directory};
use crate::process::{self, Result};
use crate::workspace::{Metadata, target_directory};

/// The part to which the build belongs.
const PART: &str = "build";

/// A running cargo, and the position up to which its messages have been read.
#[derive(Debug)]
pub struct Build {
    command: Command,
    /// The file with cargo's standard output.
    messages: PathBuf,
    read: u64,
    /// Programs that are not linked yet, as package and name.
    missing: Vec<(String, String)>,
    /// Tests that wait for such a program.
    held: Vec<Binary>,
}

impl Build {
    /// The cargo command that builds each dependency once: all packages, with the features of all.
    pub fn new() -> Result<Self> {
        let mut command = process::cargo();
        command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
        let programs = Metadata::of_members(None)?.targets();
        let programs = programs.into_iter().filter(|target| target.kind == "bin");
        let missing = programs.map(|target| (target.package, target.name)).collect();
        let messages = directory().join("messages.json");
        Self::of(command, messages, missing)
    }

    /// Prepares a build with this command, which writes into this file.
    ///
    /// An existing file is removed, because the programs that it lists may be out of date.
    pub(super) fn of(command: Command, messages: PathBuf, missing: Vec<(String, String)>) -> Result<Self> {
        match std::fs::remove_file(&messages) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", messages.display()))
            }
            _ => Ok(Self { command, messages, read: 0, missing, held: Vec::new() }),
        }
    }

    /// The job that runs the build, for the scheduler.
    pub fn take_job(&mut self) -> Job {
        let command = std::mem::replace(&mut self.command, Command::new("true"));
        let job = Job::new(PART, PART, command).calls_cargo();
        Job { messages: Some(self.messages.clone()), ..job }
    }

    /// The test programs that have become runnable since the last call.
    pub fn come(&mut self) -> Result<Vec<Binary>> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.messages.display());
        let mut file = match File::open(&self.messages) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        file.seek(SeekFrom::Start(self.read)).map_err(failed)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        // The file may end inside a line, or inside a character, because cargo is still writing.
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        self.read += whole as u64;
        let lines = text[..whole].split(|byte| *byte == b'\n');
        let messages = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        for message in messages {
            self.missing.retain(|(package, name)| !is_program(&message, package, name));
            self.held.extend(Binary::of(&message));
        }
        let (held, ready) = std::mem::take(&mut self.held).into_iter().partition(|binary: &Binary| {
            binary.kind == "test" && self.missing.iter().any(|(package, _)| *package == binary.package)
        });
        self.held = held;
        Ok(ready)
    }

    /// The tests that still wait for a program of their package after the end of cargo.
    pub fn never_ready(self) -> Vec<Binary> {
        self.held
    }
}

fn is_program(message: &Value, package: &str, name: &str) -> bool {
    message["target"]["kind"][0] == "bin"
        && message["target"]["name"] == name
        && message["profile"]["test"] == false
        && !message["executable"].is_null()
        && message["package_id"].as_str().is_some_and(|id| package_of(id) == package)
}

/// The path of a program that the build has created.
pub fn built_program(name: &str) -> PathBuf {
    target_directory().join("debug").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn come_reads_whole_lines_once() {
        let (mut build, path) = build("lines", &[]);
        let line = message("test", true);

        assert_eq!(build.come(), Ok(Vec::new()));
        std::fs::write(&path, format!("{line}\n{}", &line.to_string()[..20])).expect("a file");
        assert_eq!(build.come().expect("one").len(), 1);
        std::fs::write(&path, format!("{line}\n{line}\n")).expect("a file");
        assert_eq!(build.come().expect("the other").len(), 1);
        std::fs::remove_file(&path).expect("a file");
    }

    #[test]
    fn come_holds_tests_back_until_the_programs_of_their_package_are_linked() {
        let (mut build, path) = build("programs", &[("a", "engine"), ("b", "other")]);

        std::fs::write(&path, format!("{}\n", message("test", true))).expect("a file");
        assert_eq!(build.come(), Ok(Vec::new()));
        let all = format!("{}\n{}\n", message("test", true), message("bin", false));
        std::fs::write(&path, all).expect("a file");
        assert_eq!(build.come().expect("the test").len(), 1);
        std::fs::remove_file(&path).expect("a file");
    }

    fn build(name: &str, missing: &[(&str, &str)]) -> (Build, PathBuf) {
        let path = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let missing = missing.iter().map(|(package, name)| ((*package).into(), (*name).into())).collect();
        std::fs::write(&path, format!("{}\n", message("lib", true))).expect("what an earlier run left");
        (Build::of(Command::new("true"), path.clone(), missing).expect("a build"), path)
    }

    fn message(kind: &str, test: bool) -> Value {
        serde_json::json!({"reason": "compiler-artifact", "profile": {"test": test},
            "manifest_path": "/w/a/Cargo.toml", "package_id": "path+file:///w/a#0.1.0",
            "target": {"kind": [kind], "name": "engine"}, "executable": "/w/a-1"})
    }
}
