//! The standby's machine: decides when it takes the protected guest over, and when it discards it.
//!
//! ```text
//! Seeding ──checkpoint 1 held──► Following ──unprotect──► Discarded
//!   ▼ any failure                    │ patience over, given
//! Discarded                       Preparing ──failed──► Unready ──retry──► Preparing
//!                                    ▼
//!                                 Claiming ──lost──► Discarded
//!                                    ▼ won
//!                                [Fencing ──failed──► Unfenced]
//!                                    ▼
//!                                 Starting ──failed──► Held ──retry──► Starting
//!                                    ▼
//!                                 Running
//! ```
//!
//! * From [`State::Preparing`] on the standby sends no answers, because an answer would extend the
//!   primary's lease.
//! * The standby claims only after every step that can fail, except the start itself. A standby
//!   that cannot start the guest leaves the claim to the primary.
//! * On every event the machine checks the time first. Therefore a standby that was frozen for
//!   longer than its patience sends no answer either.

mod table;
mod types;

pub use types::{Action, Because, Config, Event, Outcome, Refusal, State};

use super::claim::Claim;
use std::time::Duration;

/// The standby's machine, one per protection; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Standby {
    config: Config,
    state: State,
    claim: Claim,
    /// The last complete checkpoint; 0 before the first.
    held: u64,
    /// The last heartbeat that was read.
    heard: u64,
    /// Time of the last echo of a heartbeat, or of the first checkpoint.
    last_echo: Option<Duration>,
    is_in_contact: bool,
    /// The primary has stopped the guest for this side.
    is_given: bool,
}

impl Standby {
    /// A machine in [`State::Seeding`].
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            state: State::Seeding,
            claim: Claim::Idle,
            held: 0,
            heard: 0,
            last_echo: None,
            is_in_contact: true,
            is_given: false,
        }
    }

    /// Reports an event to the machine. The engine performs the returned actions in order.
    ///
    /// `now` is the time since any fixed moment.
    ///
    /// # Errors
    /// [`Refusal`] if the event is impossible in this state; the machine did not change. An event
    /// that is too late by now is no error: the actions that are due are returned instead.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// The present state; only [`Standby::handle`] changes it.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The time at which something is due: an [`Event::Tick`] at or after it acts.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Following => self.last_echo.map(|last| last.saturating_add(self.config.terms.patience())),
            State::Claiming => self.claim.deadline(),
            _ => None,
        }
    }

    /// The last complete checkpoint; 0 before the first.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Whether the primary has stopped the guest for this side.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// Whether the primary is in contact, according to the last event of the channels.
    #[must_use]
    pub fn is_in_contact(&self) -> bool {
        self.is_in_contact
    }
}
