//! The standby's machine.
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
//! * From [`State::Preparing`] on the standby answers nothing any more: an
//!   answer would extend the primary's lease.
//! * The claim comes after everything that can fail was done but the start
//!   itself: a standby that cannot start the guest leaves the claim to the
//!   primary.
//! * Whatever the machine is told, it looks at the time first. A standby that
//!   was frozen for longer than its patience answers nothing either.

mod table;
mod types;

pub use types::{Action, Because, Config, Event, Outcome, Refusal, State};

use super::claim::Claim;
use std::time::Duration;

/// The standby's machine. One per protection; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Standby {
    config: Config,
    state: State,
    claim: Claim,
    /// The last checkpoint that is held.
    held: u64,
    /// The last heartbeat that was read.
    heard: u64,
    /// When the last heartbeat was read and echoed, or the first checkpoint was held.
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

    /// Tells the machine what happened; the engine performs what comes back,
    /// in order. `now` is the time since any fixed moment.
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
        match self.state {
            State::Following => self.last_echo.map(|last| last.saturating_add(self.config.terms.patience())),
            State::Claiming => self.claim.deadline(),
            _ => None,
        }
    }

    /// The last checkpoint that is held; 0 before the first.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Whether the primary has stopped the guest for this side.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// Whether the primary is in contact, as far as this side knows.
    #[must_use]
    pub fn is_in_contact(&self) -> bool {
        self.is_in_contact
    }
}
