//! Making sure that the other side does not run.

use std::time::Duration;

use crate::claim::Claim;
use crate::command::{CommandLine, End, run, variables};

/// A command that makes sure that the other side does not run, for example by switching its host off.
///
/// It gets the same variables as the command of an `exec:` arbiter; the role and process are those of the side that fences.
#[derive(Debug, Clone)]
pub struct Fence {
    line: CommandLine,
    limit: Duration,
}

/// The other side may still run: nobody starts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the fence {command} {problem}; the other side may still run, so nobody may start: mend the command or its target, then fence \
     again, or stop the other side by hand and decide"
)]
#[non_exhaustive]
pub struct FenceError {
    /// The command.
    pub command: String,
    /// How it failed, and what it said.
    pub problem: String,
}

impl Fence {
    /// `limit` is how long the command may take.
    pub fn new(line: CommandLine, limit: Duration) -> Self {
        Self { line, limit }
    }

    /// Runs the command. Only the exit code 0 is a success.
    ///
    /// # Errors
    /// The command was not started, exited with another code, was ended by a signal, or took longer than the limit and was
    /// killed with its process group.
    pub fn run(&self, claim: &Claim) -> Result<(), FenceError> {
        let (end, said) = run(&self.line, &variables(claim), self.limit);
        let problem = match end {
            End::Exited(0) => return Ok(()),
            End::Exited(code) => format!("exited with {code}"),
            End::Failed(problem) => problem,
        };
        let said = said.map_or_else(String::new, |said| format!("; it said {said}"));
        Err(FenceError { command: self.line.to_string(), problem: format!("{problem}{said}") })
    }
}
