//! Runs commands that an operator configures, without a shell and under a time limit.

mod line;
mod run;

pub use line::{CommandLine, CommandLineError};
pub(crate) use run::{End, run};

use crate::claim::Claim;

/// Returns the environment variables by which a command learns the claim.
pub(crate) fn variables(claim: &Claim) -> [(&'static str, String); 4] {
    [
        ("STERNA_CLAIM_GUEST", claim.guest.to_string()),
        ("STERNA_CLAIM_GENERATION", claim.generation.to_string()),
        ("STERNA_CLAIM_ROLE", claim.claimant.role().to_string()),
        ("STERNA_CLAIM_PROCESS", claim.claimant.process().to_owned()),
    ]
}
