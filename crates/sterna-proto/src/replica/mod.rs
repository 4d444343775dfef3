//! Who may run a guest that is protected by a standby: pure state machines.
//!
//! A *primary* runs the guest and sends checkpoints; a *standby* holds them
//! and runs nothing. Checkpoints are numbered from 1 within a *protection*;
//! the time between two of them is an *epoch*. What the guest says in epoch
//! `n` waits in the primary's *gate* until the standby holds checkpoint `n`.
//! If the primary is gone, the standby starts the guest from the last
//! checkpoint that it holds whole. That state is at least as new as anything
//! the world has seen of the guest.
//!
//! Three rules decide who may run:
//!
//! 1. **The lease.** The primary sends numbered heartbeats and the standby
//!    echoes them. The primary's lease ends [`Terms::lease`] after it *sent*
//!    the last heartbeat that was echoed. With the lease, the guest stops and
//!    the gate closes. The standby waits [`Terms::patience`] from its last
//!    *echo*, which is always longer.
//! 2. **The claim.** Without a valid lease only who wins the arbiter's claim
//!    of this protection's generation runs the guest. The first who asks wins,
//!    for ever. An arbiter out of reach leaves both waiting.
//! 3. **The last word.** A standby that says *never* discards what it holds,
//!    and the primary goes on without a claim.
//!
//! ```text
//! primary                                   standby
//! -------                                   -------
//! Seeding       RAM, rounds       ------->  Seeding
//! Protected     checkpoint 1..n   ------->  Following
//!               heartbeat h       ------->
//!               gate: release n   <-------  Answer: holds n, heard h
//!
//! lost contact or lease over                lost contact, patience over
//! Asking        claim? ─► arbiter ◄─ claim? Preparing, Claiming
//!   won: Alone   lost: Lost                 won: Fencing, Starting, Running   lost: Discarded
//!
//! planned: HandingOver, last checkpoint ─►  Following
//! Given         GIVE, guest is stopped ──►  Preparing, Claiming, Starting
//! HandedOver                        ◄─────  Running
//!
//! Ending        UNPROTECT         ------->  Following
//! Alone                           <-------  NEVER: Discarded
//! ```
//!
//! The machines hold no socket, thread, clock or randomness. The simulator in
//! `sim` (feature `sim`, and the crate's own tests) drives them with clocks
//! that drift, processes that freeze, messages that are lost, and an arbiter
//! that each side reaches or not.

mod claim;
pub mod primary;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod standby;

use std::time::Duration;

/// Names one protection of one guest by one standby. The primary draws `id`;
/// `generation` is higher by one than that of the guest's protection before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protection {
    /// Drawn by the primary for this protection.
    pub id: [u8; 16],
    /// What the arbiter's claim is about.
    pub generation: u64,
}

/// The times that both sides of a protection agree on before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// From heartbeat to heartbeat.
    pub heartbeat: Duration,
    /// How long the primary may run the guest after it sent a heartbeat that
    /// was echoed.
    pub lease: Duration,
    /// By how much the rates of the two hosts' clocks differ at most, in
    /// thousandths.
    pub drift_per_mille: u32,
    /// What stopping a guest takes at most after its lease has ended.
    pub margin: Duration,
    /// From a claim that found no arbiter to the next try.
    pub claim_interval: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(200),
            lease: Duration::from_secs(2),
            drift_per_mille: 10,
            margin: Duration::from_millis(500),
            claim_interval: Duration::from_secs(1),
        }
    }
}

impl Terms {
    /// How long a standby waits from its last echo until it may claim: the
    /// lease on the primary's clock, seen from this one, and the margin.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let drift = self.lease.saturating_mul(self.drift_per_mille) / 1000;
        self.lease.saturating_add(drift).saturating_add(self.margin)
    }

    /// Whether a protection can live with these times.
    ///
    /// # Errors
    /// [`BadTerms`] says which.
    pub fn check(&self) -> Result<(), BadTerms> {
        if self.heartbeat.is_zero() || self.heartbeat.saturating_mul(3) > self.lease {
            return Err(BadTerms::Heartbeat { heartbeat: self.heartbeat, lease: self.lease });
        }
        if self.margin.is_zero() {
            return Err(BadTerms::NoMargin);
        }
        if self.claim_interval.is_zero() {
            return Err(BadTerms::NoClaimInterval);
        }
        Ok(())
    }
}

/// Times that no protection can live with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadTerms {
    /// One lost heartbeat would end the lease.
    #[error(
        "a heartbeat every {} ms and a lease of {} ms: the lease must outlast three heartbeats, and a heartbeat \
         cannot be 0",
        heartbeat.as_millis(),
        lease.as_millis()
    )]
    Heartbeat {
        /// From heartbeat to heartbeat.
        heartbeat: Duration,
        /// The lease.
        lease: Duration,
    },
    /// Stopping a guest takes time.
    #[error("the margin is 0: give it the time that stopping the guest takes at most")]
    NoMargin,
    /// The arbiter would be asked all the time.
    #[error("the interval between two claims is 0: give it at least some milliseconds")]
    NoClaimInterval,
}

/// What a standby says of itself: all that it holds and has heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Which protection it speaks of.
    pub protection: Protection,
    /// The last checkpoint that it holds whole; 0 before the first.
    pub held: u64,
    /// The last heartbeat that it has read; 0 before the first.
    pub heartbeat: u64,
}

/// What the arbiter says of a claim. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ruling {
    /// Who asked has the guest.
    Won,
    /// The other side has it.
    Lost,
}
