//! The scheduler of `cargo xtask test`: programs side by side, each with its output in a file.
//!
//! What the tests need most is time to wait in, not cores, so more programs run at once than there are cores, as long
//! as a core is idle. The longest begin first. What a program prints is shown if it fails; if it hangs, its limit ends
//! it, with the names of the tests that were running.

mod binary;
mod build;
mod history;
mod load;
mod log;
mod report;
mod rules;
mod runner;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

pub use binary::Binary;
pub use build::{Build, built_program};
pub use report::{Done, Report};
pub use rules::DOWNLOAD_LIMIT;
pub use runner::Runner;

use crate::workspace::target_directory;

/// What a job may have beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Any others.
    Others,
    /// Any others but those that call cargo: cargo lets one at a time build.
    NoCargo,
    /// Nothing: it measures, or takes most of the machine. Such jobs come last.
    Nothing,
}

/// One program to run.
#[derive(Debug)]
pub struct Job {
    /// The part of the command whose line tells how it ended.
    pub part: &'static str,
    /// Told in the lines of the report, and remembered with its duration.
    pub name: String,
    pub command: Command,
    /// The tests in it, in the order in which libtest runs them; none if it is no test program.
    pub tests: Vec<String>,
    pub beside: Beside,
    /// Parts that must have ended before.
    pub after: &'static [&'static str],
    /// It is ended after that long, and has failed.
    pub limit: Duration,
    /// Its standard output goes there instead of among what is shown.
    pub messages: Option<PathBuf>,
    /// It is one of our own commands: its notes are taken into the closing words.
    pub notes: bool,
}

impl Job {
    /// A program of that part, which may run beside others.
    pub fn new(part: &'static str, name: impl Into<String>, command: Command) -> Self {
        let (tests, after) = (Vec::new(), &[][..]);
        let (beside, limit, messages, notes) = (Beside::Others, rules::LIMIT, None, false);
        Self { part, name: name.into(), command, tests, beside, after, limit, messages, notes }
    }

    /// One of our own commands.
    pub fn of_ours(part: &'static str, arguments: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
        command.args(arguments);
        Self { notes: true, ..Self::new(part, part, command) }
    }

    pub fn after(self, after: &'static [&'static str]) -> Self {
        Self { after, ..self }
    }

    /// Calls cargo: one at a time, and the tests that run meanwhile come first on the cores.
    pub fn calls_cargo(self) -> Self {
        let mut command = Command::new("nice");
        command.args(["-n", "10"]).arg(self.command.get_program()).args(self.command.get_args());
        for (key, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        if let Some(directory) = self.command.get_current_dir() {
            command.current_dir(directory);
        }
        Self { command, beside: Beside::NoCargo, limit: rules::CARGO_LIMIT, ..self }
    }
}

/// Where the scheduler keeps logs and durations.
fn directory() -> PathBuf {
    target_directory().join("xtask")
}
