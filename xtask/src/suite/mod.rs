//! The scheduler of `cargo xtask test`: runs programs in parallel, each with its output in a file.
//!
//! The tests spend most of their time waiting. Therefore more programs run than there are cores, as
//! long as a core is idle. The longest programs start first. The output of a program is shown if it
//! fails. A program that hangs is killed at its limit, and the report names the tests that were
//! running.

mod again;
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

/// Which other jobs may run in parallel with a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Any other job may run.
    Others,
    /// Any other job that does not call cargo, because cargo serialises builds.
    NoCargo,
    /// No other job, because this job measures or uses most of the machine. Such jobs run last.
    Nothing,
}

/// One program that the scheduler runs.
#[derive(Debug)]
pub struct Job {
    /// The part whose closing line reports the result.
    pub part: &'static str,
    /// The name in the report and in the stored durations.
    pub name: String,
    pub command: Command,
    /// The tests in the program, in libtest's order; empty if it is no test program.
    pub tests: Vec<String>,
    pub beside: Beside,
    /// Parts that must have ended before this job starts.
    pub after: &'static [&'static str],
    /// The job is killed and fails after this time, which counts as on a quiet machine.
    pub limit: Duration,
    /// The file for its standard output, which is then not part of the shown output.
    pub messages: Option<PathBuf>,
    /// The job is a command of xtask itself: its notes are added to the closing lines.
    pub notes: bool,
    /// The name of the job whose failed tests this job runs again.
    pub again_for: Option<String>,
}

impl Job {
    /// A program of that part, which may run in parallel with others.
    pub fn new(part: &'static str, name: impl Into<String>, command: Command) -> Self {
        let (tests, after) = (Vec::new(), &[][..]);
        let (beside, limit, messages, notes) = (Beside::Others, rules::LIMIT, None, false);
        let again_for = None;
        Self { part, name: name.into(), command, tests, beside, after, limit, messages, notes, again_for }
    }

    /// A command of xtask itself.
    pub fn of_ours(part: &'static str, arguments: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
        command.args(arguments);
        Self { notes: true, ..Self::new(part, part, command) }
    }

    pub fn after(self, after: &'static [&'static str]) -> Self {
        Self { after, ..self }
    }

    /// Marks the job as a call of cargo.
    ///
    /// Only one such job runs at a time, at a lower priority than the tests.
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

/// The directory of the scheduler's logs and durations.
fn directory() -> PathBuf {
    target_directory().join("xtask")
}
