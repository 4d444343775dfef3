//! What an arbiter is asked, and what it answers.

use std::fmt;

use crate::claim::{Claim, Claimant, Generation, GuestName};
use crate::error::ClaimError;

/// Decides who has the claim of a generation.
///
/// In a generation the first one wins, for ever. The winner gets [`Ruling::Won`] whenever it asks again.
pub trait Arbiter: Send + Sync + fmt::Debug {
    /// Asks for the claim. Several threads may ask at once.
    ///
    /// Whoever has asked once goes on until there is a ruling: a claim whose answer was lost may have won, and then nobody else
    /// can win in that generation.
    ///
    /// # Errors
    /// There is no ruling, and nobody may start. Whether the claim took effect is unknown: the next answer may be
    /// [`Ruling::Won`] or [`Ruling::Lost`].
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError>;

    /// What two sides have in common if they ask one arbiter, as far as it can be known: whoever asks first leaves a random token
    /// there, and the other one reads it. So a copy of a directory is another arbiter, and so are two clusters that were set up
    /// alike. Claims nothing; also says whether the arbiter can be asked now.
    ///
    /// # Errors
    /// The arbiter cannot be asked now.
    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError>;

    /// Takes away what [`Arbiter::identity`] has left there, once both sides have read it. What cannot be taken away stays, and
    /// means nothing.
    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        let _ = (guest, generation);
    }
}

/// An arbiter's answer. It is final.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ruling {
    /// Whoever asked has the claim.
    Won,
    /// Another one has it.
    Lost {
        /// Who has it, if the arbiter says that.
        winner: Option<Claimant>,
    },
}

/// Which arbiter it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Identity {
    /// Two sides that see the same text ask one arbiter.
    Is(String),
    /// This kind of arbiter does not say.
    Unknown,
}
