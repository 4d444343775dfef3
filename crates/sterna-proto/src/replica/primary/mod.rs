//! The primary's machine.
//!
//! ```text
//! Seeding ──checkpoint 1 taken──► Protected ──unprotect──► Ending ──never──► Alone
//!   │                              │     └──hand over──► HandingOver ─► Given ──► HandedOver
//!   ▼ any failure                  │                          │           │
//! Failed                           ▼ lost contact, lease over ▼           ▼
//!                                Asking ──won──► Alone
//!                                      └──lost──► Lost
//! ```
//!
//! * The first checkpoint is the commit of the protection: from its end on the
//!   standby may start the guest, so every failure is settled by the lease and
//!   the claim. Before it, a failure leaves the guest as it was.
//! * Whatever the machine is told, it looks at the lease first: a process that
//!   was frozen finds out before it does anything else.
//! * Contact that is lost does not come back: the channels are closed, and the
//!   guest is protected again in the next generation.

mod lease;
mod table;
mod types;

pub use types::{Action, Because, Cause, Config, Event, Outcome, Refusal, State};

use super::claim::Claim;
use lease::Lease;
use std::time::Duration;

/// The primary's machine. One per protection; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Primary {
    config: Config,
    state: State,
    lease: Lease,
    claim: Claim,
    /// The last checkpoint that was taken.
    taken: u64,
    /// The last one that the standby holds.
    held: u64,
    /// The last one of all, in a planned takeover.
    last: Option<u64>,
    is_guest_stopped: bool,
    cause: Option<Cause>,
}

impl Primary {
    /// A machine in [`State::Seeding`]. `now` is the time since any fixed
    /// moment, as in every later call.
    #[must_use]
    pub fn new(config: Config, now: Duration) -> Self {
        let Config { terms, .. } = config;
        Self {
            config,
            state: State::Seeding,
            lease: Lease::new(terms.lease, terms.heartbeat, now),
            claim: Claim::Idle,
            taken: 0,
            held: 0,
            last: None,
            is_guest_stopped: false,
            cause: None,
        }
    }

    /// Tells the machine what happened; the engine performs what comes back,
    /// in order.
    ///
    /// # Errors
    /// [`Refusal`] if the event cannot be in this state; nothing changed. An
    /// event for which it is too late by now is no error: what the time
    /// demands comes back instead.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// Where the machine stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When something is due: an [`Event::Tick`] at or after it acts.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let lease = self.lease.end().filter(|_| !self.is_guest_stopped || self.state.is_in_contact());
        match self.state {
            State::Seeding => Some(self.lease.next_heartbeat()),
            state if state.is_in_contact() => {
                let beat = self.lease.next_heartbeat();
                Some(lease.map_or(beat, |end| end.min(beat)))
            }
            State::Asking => [lease, self.claim.deadline()].into_iter().flatten().min(),
            _ => None,
        }
    }

    /// Whether the gate may let go what the guest said in this epoch (the
    /// first is 1), now. Asked for every piece at the moment at which it
    /// leaves.
    #[must_use]
    pub fn may_say(&self, now: Duration, epoch: u64) -> bool {
        match self.state {
            State::Seeding | State::Alone | State::Failed => true,
            State::HandedOver | State::Lost => false,
            // The first epoch ends with the first checkpoint.
            _ => epoch <= self.held && !self.lease.is_over(now),
        }
    }

    /// The last checkpoint that the standby holds; 0 before the first.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Whether another checkpoint may be taken.
    #[must_use]
    pub fn may_take_checkpoint(&self) -> bool {
        let is_time = matches!(self.state, State::Seeding | State::Protected | State::Ending);
        is_time && self.taken - self.held < self.config.in_flight.max(1)
    }

    /// Whether the guest may run. Asked before it is resumed after a
    /// checkpoint, or at its operator's wish.
    #[must_use]
    pub fn may_guest_run(&self) -> bool {
        match self.state {
            State::HandingOver | State::Given | State::HandedOver | State::Lost => false,
            _ => !self.is_guest_stopped,
        }
    }

    /// Why contact is over, if it is.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }
}
