//! The interface of an arbiter: the trait [`Arbiter`], its rulings and its identity.
//!
//! Both sides of a protected guest use the same arbiter, so that at most one of them may run the guest.

use std::fmt;

use crate::claim::{Claim, Claimant, Generation, GuestName};
use crate::error::ClaimError;

/// Gives the exclusive right to run a guest to one claimant per generation.
///
/// The first claim of a generation wins, and no later claim of that generation can win. The winner gets
/// [`Ruling::Won`] each time it asks again.
pub trait Arbiter: Send + Sync + fmt::Debug {
    /// Requests the claim of a generation. Several threads may call this in parallel.
    ///
    /// A claimant that has called this once must repeat the call until it gets a ruling. If the answer to a
    /// winning claim was lost, no other claimant can win in that generation.
    ///
    /// # Errors
    /// The arbiter gave no ruling, so the caller must not start the guest. The error does not tell whether the
    /// claim took effect: the next answer may be [`Ruling::Won`] or [`Ruling::Lost`].
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError>;

    /// Returns a value by which two sides check that they use the same arbiter.
    ///
    /// The first caller stores a random token at the arbiter, and the other side reads the same token. A copy
    /// of a directory therefore counts as another arbiter, and so do two clusters with the same configuration.
    /// The call claims nothing. It also shows whether the arbiter is reachable now.
    ///
    /// # Errors
    /// The arbiter did not answer now.
    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError>;

    /// Removes the token that [`Arbiter::identity`] stored. Call it after both sides have read the token.
    ///
    /// A token that cannot be removed has no effect on claims.
    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        let _ = (guest, generation);
    }
}

/// The final answer of an arbiter to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ruling {
    /// The caller has the claim.
    Won,
    /// Another claimant has the claim.
    Lost {
        /// The winner, if the arbiter reports it.
        winner: Option<Claimant>,
    },
}

/// The result of [`Arbiter::identity`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Identity {
    /// The arbiter's token. Two sides that read equal texts use the same arbiter.
    Is(String),
    /// This kind of arbiter has no identity that can be compared.
    Unknown,
}
