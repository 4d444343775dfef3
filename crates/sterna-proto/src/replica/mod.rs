//! Who may run a guest that is protected by a standby: pure state machines.
//!
//! A *primary* runs the guest and sends checkpoints. A *standby* stores them and runs no guest.
//! Checkpoints are numbered from 1 within a *protection*; the time between two of them is an
//! *epoch*.
//!
//! The guest's output of epoch `n` waits in the primary's *gate* until the standby has stored
//! checkpoint `n`. If the primary fails, the standby starts the guest from the last complete
//! checkpoint. That state includes every state whose output has been released.
//!
//! Three rules decide who may run:
//!
//! 1. **The lease.** The primary sends numbered heartbeats and the standby echoes them. The
//!    primary's lease ends [`Terms::lease`] after it *sent* the last heartbeat that was echoed. When
//!    the lease ends, the guest stops and the gate closes. The standby waits [`Terms::patience`] from
//!    its last *echo*, which is always longer.
//! 2. **The claim.** Without a valid lease, only the side that wins the arbiter's claim of this
//!    protection's generation runs the guest. The first side that asks wins, and the ruling never
//!    changes. If the arbiter is out of reach, both sides wait.
//! 3. **The last answer.** A standby that sends *never* discards its checkpoints, and the primary
//!    continues without a claim.
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
//! The machines contain no socket, thread, clock or randomness. The simulator in `sim` (feature
//! `sim`, and the crate's own tests) drives them. It simulates clocks that drift, processes that
//! freeze, messages that are lost, and an arbiter that either side may be unable to reach.

mod claim;
mod machine;
pub mod primary;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod standby;

use std::time::Duration;

/// Names one protection of one guest by one standby.
///
/// The primary draws `id`. `generation` is one more than the generation of the guest's previous
/// protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protection {
    /// Drawn at random by the primary for this protection.
    pub id: [u8; 16],
    /// The number that a claim at the arbiter names.
    pub generation: u64,
}

/// Time limits on which both sides agree before a protection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Interval between two heartbeats.
    pub heartbeat: Duration,
    /// How long the primary may run the guest after it sent a heartbeat that was echoed.
    pub lease: Duration,
    /// The largest difference between the rates of the two hosts' clocks, in thousandths.
    pub drift_per_mille: u32,
    /// The longest time that stopping a guest takes after its lease has ended.
    pub margin: Duration,
    /// From a claim that reached no arbiter to the next attempt.
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
    /// How long a standby waits from its last echo until it may claim.
    ///
    /// This is the primary's lease, measured with this side's clock, plus the margin.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let drift = self.lease.saturating_mul(self.drift_per_mille) / 1000;
        self.lease.saturating_add(drift).saturating_add(self.margin)
    }

    /// Checks that the times fit each other.
    ///
    /// # Errors
    /// [`BadTerms`] names the time that is too short.
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

/// A time limit that makes a protection impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadTerms {
    /// The lease is so short that one lost heartbeat would end it.
    #[error(
        "a heartbeat every {} ms and a lease of {} ms: the lease must outlast three heartbeats, and a heartbeat \
         cannot be 0",
        heartbeat.as_millis(),
        lease.as_millis()
    )]
    Heartbeat {
        /// Interval between two heartbeats.
        heartbeat: Duration,
        /// The primary's lease in these terms.
        lease: Duration,
    },
    /// The margin is 0, but stopping a guest takes time.
    #[error("the margin is 0: give the longest time that stopping the guest takes")]
    NoMargin,
    /// The interval is 0, so the arbiter would be asked without a break.
    #[error("the interval between two claims is 0: give it at least some milliseconds")]
    NoClaimInterval,
}

/// A standby's report: the checkpoint that it has stored, and the heartbeat that it echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The protection that the answer concerns.
    pub protection: Protection,
    /// The last complete checkpoint at the standby; 0 before the first.
    pub held: u64,
    /// The last heartbeat that the standby has read; 0 before the first.
    pub heartbeat: u64,
}

/// The arbiter's answer to a claim. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ruling {
    /// The side that asked has the guest.
    Won,
    /// The other side has the guest.
    Lost,
}
