//! The arbiter `exec:COMMAND`: a program decides each claim.

use std::time::Duration;

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Generation, GuestName};
use crate::command::{CommandLine, End, run, variables};
use crate::error::ClaimError;

/// Runs a command for each claim. Exit code 0 means won, 1 means lost.
#[derive(Debug)]
pub(crate) struct Exec {
    line: CommandLine,
    limit: Duration,
}

impl Exec {
    pub(crate) fn new(line: CommandLine, limit: Duration) -> Self {
        Self { line, limit }
    }

    fn unreachable(&self, problem: String, said: Option<String>) -> ClaimError {
        let said = said.map_or_else(String::new, |said| format!("; its output: {said}"));
        ClaimError::unreachable(
            format!("the arbiter exec:{}", self.line),
            format!("the command {problem}{said}"),
            "run it yourself with the variables STERNA_CLAIM_*, repair it, then ask again",
        )
    }
}

impl Arbiter for Exec {
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError> {
        let (end, said) = run(&self.line, &variables(claim), self.limit);
        match end {
            End::Exited(0) => Ok(Ruling::Won),
            End::Exited(1) => Ok(Ruling::Lost { winner: None }),
            End::Exited(code) => Err(self
                .unreachable(format!("exited with {code}, but only 0 (won) and 1 (lost) are rulings"), said)),
            End::Failed(problem) => Err(self.unreachable(problem, said)),
        }
    }

    fn identity(&self, _: &GuestName, _: Generation) -> Result<Identity, ClaimError> {
        Ok(Identity::Unknown)
    }
}
