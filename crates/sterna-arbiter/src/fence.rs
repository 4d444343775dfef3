//! Fences: commands that make sure that the other side does not run the guest.

use std::time::Duration;

use crate::claim::Claim;
use crate::command::{CommandLine, End, run, variables};

/// A command that makes sure that the other side does not run the guest.
///
/// For example, it powers the other host off. The command gets the same variables as the command of an `exec:`
/// arbiter. The role and process in them name the side that fences.
#[derive(Debug, Clone)]
pub struct Fence {
    line: CommandLine,
    limit: Duration,
}

/// The fence failed. The other side may still run, so this side must not start the guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the fence {command} {problem}; the primary may still run the guest, so the guest does not start here until the \
     fence succeeds: repair the command or its target"
)]
#[non_exhaustive]
pub struct FenceError {
    /// The command line of the fence, as text.
    pub command: String,
    /// How the command failed, and the end of its standard error.
    pub problem: String,
}

impl Fence {
    /// Makes a fence. `limit` is the time after which the command is killed.
    pub fn new(line: CommandLine, limit: Duration) -> Self {
        Self { line, limit }
    }

    /// Runs the command. Only exit code 0 is a success.
    ///
    /// # Errors
    /// The command did not start, exited with another code, was ended by a signal, or exceeded the limit. At
    /// the limit it is killed with its process group.
    pub fn run(&self, claim: &Claim) -> Result<(), FenceError> {
        let (end, said) = run(&self.line, &variables(claim), self.limit);
        let problem = match end {
            End::Exited(0) => return Ok(()),
            End::Exited(code) => format!("exited with {code}"),
            End::Failed(problem) => problem,
        };
        let said = said.map_or_else(String::new, |said| format!("; its output: {said}"));
        Err(FenceError { command: self.line.to_string(), problem: format!("{problem}{said}") })
    }
}
