//! The source's handover machine.
//!
//! ```text
//! Setup ─► Identifying ─► Comparing ─► Active ─► Stopping ─► [PreSwitchover]
//!   │      (return path)   (Sterna)                               │
//!   └───────────────(no return path)────► Active                  ▼
//!                                               Releasing ─► Switchover
//!                                                                 │
//!        any failure, limit or cancel up to here             Preparing
//!                        │                                        │ PONG
//!                        ▼                             ═══════════╪═ commit
//!            Cancelling / Failing ◄──SHUT≠0, never──┐        Committing
//!             hooks back, in reverse                │             │ EOF sent
//!             guest resumed if it ran               ├────── AwaitingAck
//!             tracking stopped                      │   lost,│    │ SHUT 0
//!               │          │                        │   late ▼    ▼
//!               ▼          ▼ undoing failed         └── Undecided ─► Completed
//!      Cancelled/Failed   Held ──cont──► again           asks again
//! ```
//!
//! A connection that is lost before the PONG ends nothing if both sides can go on over another one: from Active to Preparing
//! ─► Suspending (channels closed, hooks back, guest resumed) ─► Reconnecting ─► Active, until
//! [`Limits::reconnect`](crate::Limits::reconnect) is over. Once postcopy was requested a loss fails, as without that: the
//! destination has dropped pages by then.
//!
//! With [`Config::protects`] the destination is a standby: Switchover ─►
//! Seeding ─SHUT 0─► Protected, and the guest stays here. Nothing is
//! committed, so any failure up to there lets it run on.
//!
//! With [`Event::PostcopyRequested`] the commit is RUN instead of EOF, and what
//! follows AwaitingAck is Postcopy, in which the pages go, and Completed at
//! SHUT 0. A loss in Postcopy leads to PostcopyPaused, from where nothing
//! lets the guest run here again. An operator, or the source by itself within
//! [`Limits::reconnect`](crate::Limits::reconnect), leads over PostcopyRecover
//! back to Postcopy; an answer or an operator ends it.
//!
//! * `table.rs` holds every transition; `postcopy.rs` those behind a commit
//!   in postcopy; `undo.rs` holds the way back. A ledger
//!   remembers what was done to the guest, so that exactly that is undone, and
//!   what is still under way, so that the undoing waits for it.
//! * What the engine or the peer reports after the end has begun is late, not
//!   wrong, and changes nothing. What cannot be is a [`Refusal`].
//! * In [`State::Undecided`] an answer *committed* or *never* and a SHUT are
//!   facts that never change, so an answer to an older question is as good.

mod ledger;
mod postcopy;
mod table;
mod types;
mod undo;

pub use types::{
    Action, Cause, Config, Decision, End, Event, GuestAfter, Hold, Outcome, Peer, Refusal, State,
    SwitchoverAck,
};

use crate::limits::after;
use ledger::Ledger;
use std::time::Duration;

/// The source's machine. One per migration; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Source {
    config: Config,
    state: State,
    deadline: Option<Duration>,
    peer: Peer,
    acks_due: u32,
    acks_arrived: u32,
    /// A lost connection is made anew.
    reconnects: bool,
    ledger: Ledger,
}

impl Source {
    /// A machine in [`State::Setup`]; the engine begins to connect. `now` is
    /// the time since any fixed moment, as in every later call.
    #[must_use]
    pub fn new(config: Config, now: Duration) -> Self {
        Self {
            config,
            state: State::Setup,
            deadline: after(now, config.limits.setup),
            peer: Peer::default(),
            acks_due: first_acks(&config),
            acks_arrived: 0,
            reconnects: false,
            ledger: Ledger::default(),
        }
    }

    /// Tells the machine what happened; the engine performs what comes back,
    /// in order.
    ///
    /// # Errors
    /// [`Refusal`] if the event cannot be in this state; nothing changed.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// Where the machine stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When the present wait is over: an [`Event::Tick`] at or after it acts.
    /// None while a wait has no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// What is known about the peer.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether the VMM may let the guest run at its operator's wish (`cont`).
    /// False from the moment the guest is being stopped until it is resumed.
    #[must_use]
    pub fn may_guest_run(&self) -> bool {
        self.ledger.is_guest_free() && self.state != State::Completed
    }

    /// Whether enough acknowledgements came to switch over a running guest.
    #[must_use]
    pub fn is_acknowledged(&self) -> bool {
        self.acks_arrived >= self.acks_due
    }

    /// Whether a connection that is lost now is made anew. Not once postcopy was requested: the destination drops pages then.
    #[must_use]
    pub fn would_reconnect(&self) -> bool {
        let may = matches!(
            self.state,
            State::Active
                | State::Stopping
                | State::PreSwitchover
                | State::Releasing
                | State::Switchover
                | State::Preparing
        );
        may && self.reconnects && !self.ledger.postcopy
    }

    /// Whether the guest goes on at the destination before its pages are there.
    #[must_use]
    pub fn is_postcopy(&self) -> bool {
        self.ledger.postcopy
    }

    /// Why the migration fails; `None` unless it does.
    #[must_use]
    pub fn failure(&self) -> Option<Cause> {
        match self.ledger.end {
            Some(End::Failed(cause)) => Some(cause),
            _ => None,
        }
    }

    /// Enters a state; its wait begins now.
    fn enter(&mut self, now: Duration, state: State) {
        let limits = &self.config.limits;
        let limit = match state {
            State::Setup | State::Identifying | State::Comparing => limits.setup,
            State::Stopping | State::Releasing => limits.stop,
            State::Switchover => limits.switchover,
            State::Preparing => limits.prepare,
            State::Committing => limits.commit,
            State::AwaitingAck | State::Seeding => limits.acknowledge,
            // A peer that cannot be asked leaves the decision to the operator.
            State::Undecided | State::PostcopyPaused if self.peer.sterna => limits.ask,
            State::PostcopyRecover => limits.setup,
            _ => Duration::MAX,
        };
        self.state = state;
        self.deadline = after(now, limit);
    }
}

/// Acknowledgements that are due before any device has asked.
fn first_acks(config: &Config) -> u32 {
    u32::from(config.switchover_ack == SwitchoverAck::Legacy)
}
