//! The primary's machine: decides how long the protected guest runs here, and when its output is
//! released.
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
//! * The first checkpoint is the commit of the protection. From its end on the standby may start
//!   the guest, so the lease and the claim settle every failure. Before it, a failure leaves the
//!   guest as before.
//! * On every event the machine checks the lease first. A process that was frozen therefore notices
//!   the end of its lease before it does anything else.
//! * Lost contact is never restored: the channels are closed, and the guest is protected again in
//!   the next generation.

mod lease;
mod table;
mod types;

pub use types::{Action, Because, Cause, Config, Event, Outcome, Refusal, State};

use super::claim::Claim;
use lease::Lease;
use std::time::Duration;

/// The primary's machine, one per protection; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Primary {
    config: Config,
    state: State,
    lease: Lease,
    claim: Claim,
    /// The last checkpoint that was taken; 0 before the first.
    taken: u64,
    /// The last checkpoint that the standby has stored.
    held: u64,
    /// The final checkpoint of the protection, in a planned takeover.
    last: Option<u64>,
    is_guest_stopped: bool,
    cause: Option<Cause>,
}

impl Primary {
    /// A machine in [`State::Seeding`].
    ///
    /// `now` is the time since any fixed moment, as in every later call.
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

    /// Reports an event to the machine. The engine performs the returned actions in order.
    ///
    /// # Errors
    /// [`Refusal`] if the event is impossible in this state; the machine did not change. An event
    /// that is too late by now is no error: the actions that are due are returned instead.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// The present state; only [`Primary::handle`] changes it.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The time at which something is due: an [`Event::Tick`] at or after it acts.
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

    /// Whether the gate may release the guest's output of this epoch now.
    ///
    /// The first epoch is 1. The gate calls this for every piece of output immediately before it
    /// releases the piece.
    #[must_use]
    pub fn may_say(&self, now: Duration, epoch: u64) -> bool {
        match self.state {
            State::Seeding | State::Alone | State::Failed => true,
            State::HandedOver | State::Lost => false,
            // The first epoch ends with the first checkpoint.
            _ => epoch <= self.held && !self.lease.is_over(now),
        }
    }

    /// The last checkpoint that the standby has stored; 0 before the first.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Whether the state and the limit of unanswered checkpoints permit another one.
    #[must_use]
    pub fn may_take_checkpoint(&self) -> bool {
        let is_time = matches!(self.state, State::Seeding | State::Protected | State::Ending);
        is_time && self.taken - self.held < self.config.in_flight.max(1)
    }

    /// Whether the guest may run now.
    ///
    /// Call this immediately before the guest is resumed, after a checkpoint or at its operator's
    /// request. The lease may have ended while the guest was stopped, without an event that
    /// reported it to this machine. If the lease is the reason for `false`, the next event returns
    /// [`Action::StopGuest`].
    #[must_use]
    pub fn may_guest_run(&self, now: Duration) -> bool {
        match self.state {
            State::HandedOver | State::Lost => false,
            State::Seeding | State::Alone | State::Failed => !self.is_guest_stopped,
            _ => !self.is_guest_stopped && !self.lease.is_over(now),
        }
    }

    /// How long the guest may run from now on without an answer of the standby.
    ///
    /// `None` if no limit exists, because no other side may run the guest. The time feeds a
    /// watchdog that stops this host.
    #[must_use]
    pub fn lease_lasts(&self, now: Duration) -> Option<Duration> {
        match self.state {
            State::Seeding | State::Alone | State::Failed => None,
            State::HandedOver | State::Lost => Some(Duration::ZERO),
            _ => Some(self.lease.end().unwrap_or(now).saturating_sub(now)),
        }
    }

    /// Why contact with the standby is over; `None` while it is not.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }
}
