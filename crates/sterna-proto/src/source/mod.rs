//! The source's handover machine: decides when the guest stops here, and whether it may run again.
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
//! A peer that makes its VM from the source's configuration is identified twice: Identifying ─►
//! Configuring ─► Identifying. It asks for the configuration once.
//!
//! A connection that is lost before the PONG does not end the migration if both sides can continue
//! over another one. The source goes from any state of Active to Preparing to Suspending (channels
//! closed, hooks re-acquired, guest resumed), then to Reconnecting, then to Active again.
//! [`Limits::reconnect`](crate::Limits::reconnect) limits the time. After postcopy was requested, a
//! loss fails the migration, because the destination has dropped pages by then.
//!
//! With [`Config::protects`] the destination is a standby: Switchover ─► Seeding ─SHUT 0─►
//! Protected, and the guest stays here. Nothing is committed, so after any failure before Protected
//! the guest continues here.
//!
//! With [`Event::PostcopyRequested`] the commit is RUN instead of EOF. AwaitingAck is followed by
//! Postcopy, in which the source sends the pages, and by Completed at SHUT 0. A loss in Postcopy
//! leads to PostcopyPaused, and so does an operator's decision for the destination in Undecided.
//! From there the guest never runs here again. An operator, or the source
//! itself within [`Limits::reconnect`](crate::Limits::reconnect), leads over PostcopyRecover back
//! to Postcopy. An answer of the destination or an operator's decision ends PostcopyPaused.
//!
//! * `table.rs` contains every transition, `postcopy.rs` those after a commit in postcopy,
//!   `undo.rs` the way back. The ledger records the effects on the guest, so that exactly those are
//!   undone. It also records unfinished actions, so that the undoing waits for them.
//! * A report of the engine or the peer after the end has begun is late, not wrong, and changes
//!   nothing. An event that is impossible in a state is a [`Refusal`].
//! * In [`State::Undecided`] a SHUT and the answers *committed* and *never* are facts that never
//!   change. Therefore an answer to an older question counts too.

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

/// The source's machine, one per migration; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Source {
    config: Config,
    state: State,
    deadline: Option<Duration>,
    peer: Peer,
    /// The peer has made its VM from this side's configuration.
    is_configured: bool,
    acks_due: u32,
    acks_arrived: u32,
    /// Both sides can continue over another connection if this one is lost.
    reconnects: bool,
    ledger: Ledger,
}

impl Source {
    /// A machine in [`State::Setup`]; the engine begins to connect.
    ///
    /// `now` is the time since any fixed moment, as in every later call.
    #[must_use]
    pub fn new(config: Config, now: Duration) -> Self {
        Self {
            config,
            state: State::Setup,
            deadline: after(now, config.limits.setup),
            peer: Peer::default(),
            is_configured: false,
            acks_due: first_acks(&config),
            acks_arrived: 0,
            reconnects: false,
            ledger: Ledger::default(),
        }
    }

    /// Reports an event to the machine. The engine performs the returned actions in order.
    ///
    /// # Errors
    /// [`Refusal`] if the event is impossible in this state; the machine did not change.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// The present state; only [`Source::handle`] changes it.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The end of the present wait: an [`Event::Tick`] at or after it acts.
    ///
    /// `None` while a wait has no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// The peer's answer to the extension pings; the default before [`Event::PeerIdentified`].
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether the VMM may run the guest at its operator's request (`cont`).
    ///
    /// False from the moment at which the guest is being stopped until it is resumed.
    #[must_use]
    pub fn may_guest_run(&self) -> bool {
        self.ledger.is_guest_free() && self.state != State::Completed
    }

    /// Whether enough acknowledgements have arrived to switch over a running guest.
    #[must_use]
    pub fn is_acknowledged(&self) -> bool {
        self.acks_arrived >= self.acks_due
    }

    /// Whether the source would reconnect if the connection were lost now.
    ///
    /// False after postcopy was requested, because the destination drops pages then.
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

    /// Whether the destination runs the guest before it has every page.
    #[must_use]
    pub fn is_postcopy(&self) -> bool {
        self.ledger.postcopy
    }

    /// Why the migration fails; `None` if it does not fail.
    #[must_use]
    pub fn failure(&self) -> Option<Cause> {
        match self.ledger.end {
            Some(End::Failed(cause)) => Some(cause),
            _ => None,
        }
    }

    /// Enters a state; the state's wait begins now.
    fn enter(&mut self, now: Duration, state: State) {
        let limits = &self.config.limits;
        let limit = match state {
            State::Setup | State::Identifying | State::Configuring | State::Comparing => limits.setup,
            State::Stopping | State::Releasing => limits.stop,
            State::Switchover => limits.switchover,
            State::Preparing => limits.prepare,
            State::Committing => limits.commit,
            State::AwaitingAck | State::Seeding => limits.acknowledge,
            // A peer that cannot be asked leaves the decision to the operator, without a limit.
            State::Undecided | State::PostcopyPaused if self.peer.sterna => limits.ask,
            State::PostcopyRecover => limits.setup,
            _ => Duration::MAX,
        };
        self.state = state;
        self.deadline = after(now, limit);
    }
}

/// Acknowledgements that are due before any device has requested one.
fn first_acks(config: &Config) -> u32 {
    u32::from(config.switchover_ack == SwitchoverAck::Legacy)
}
