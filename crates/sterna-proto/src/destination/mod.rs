//! The destination's handover machine.
//!
//! ```text
//!  Setup ─► Active ─PREPARE─► Completing ─loaded─► Preparing ─hooks─► Prepared
//!             │                    ▲                  │ (no prepare)   │ EOF
//!             └──EOF, no prepare───┘                  │          ══════╪═ commit
//!                                     managed ┌───────┴────────┐       │
//!                                             ▼     unmanaged  └► Committed
//!                                            Held ──cont────────►   │  starts
//!                                             │ discard             ▼
//!   any failure, limit or loss                │            Running (or Paused)
//!   up to Prepared ──────► Failing ◄──────────┴── start failed, SHUT 0 not said
//!                           hooks back, last first
//!                           SHUT 1, memory reset
//!                             ▼
//!                           Failed: answers "never"
//! ```
//!
//! In postcopy RUN takes the place of EOF as the commit, Postcopy follows
//! Committed, and Running (or Paused) follows when EOF and every page are
//! here. A loss before RUN fails, as before EOF; a loss after it leads to
//! PostcopyPaused, where the guest waits at the first page that is missing,
//! until its source connects again: over PostcopyRecover back to Postcopy. If
//! none is missing, Running (or Paused) follows: only the end was lost.
//!
//! * `table.rs` holds every transition.
//! * What is said is final. *Committed* and SHUT 0 only when the guest has
//!   been started or taken over paused. *Never* and SHUT 1 only in
//!   [`State::Failed`], which has no way out, and only when the hooks are back
//!   (or could not be given back), so that the source can take them. Between
//!   EOF and the start the answer is *pending*: the start may still fail.
//! * A loss of the connection before EOF fails; after EOF it changes nothing.
//! * After EOF, with no way to tell the source of a failure, this side holds
//!   the only copy, and keeps it in [`State::Held`] rather than reset it.

mod table;
mod types;

pub use types::{Action, Cause, Config, Event, Held, Outcome, Refusal, State};

use crate::limits::after;
use crate::{MigrationId, Status};
use std::time::Duration;

/// The destination's machine. One per migration; see the module's
/// documentation.
#[derive(Clone, Debug)]
pub struct Destination {
    config: Config,
    state: State,
    deadline: Option<Duration>,
    return_path: bool,
    id: Option<MigrationId>,
    /// The source has sent the PREPARE ping.
    prepares: bool,
    /// EOF was read without a PREPARE ping before it.
    ended: bool,
    /// The guest ran at the source.
    run: bool,
    hooks: Hooks,
    /// SHUT 0 was said, or would have been on a return path.
    committed: bool,
    /// The source comes back over another connection if this one is lost.
    reconnects: bool,
    /// `cont` was said while the hooks were missing.
    conts: bool,
    postcopy: Postcopy,
    cause: Option<Cause>,
}

/// What is known of a guest that runs before its pages are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Postcopy {
    /// RUN was read.
    is_on: bool,
    /// EOF was read behind it.
    has_ended: bool,
    /// The channels failed while the guest was being started.
    is_lost: bool,
    /// The guest was taken over paused.
    is_paused: bool,
    /// In a pause: nothing of the lost channels is fed any more.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hooks {
    None,
    Acquiring,
    /// Some or all are held.
    Held,
    GivingBack,
    Stuck,
}

impl Destination {
    /// A machine in [`State::Setup`], made when the last channel has come.
    /// `now` is the time since any fixed moment, as in every later call.
    #[must_use]
    pub fn new(config: Config, now: Duration) -> Self {
        let mut machine = Self {
            config,
            state: State::Setup,
            deadline: None,
            return_path: false,
            id: None,
            prepares: false,
            ended: false,
            run: true,
            hooks: Hooks::None,
            committed: false,
            reconnects: false,
            conts: false,
            postcopy: Postcopy::default(),
            cause: None,
        };
        machine.enter(now, State::Setup);
        machine
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

    /// The migration's id, once a Sterna source has said it.
    #[must_use]
    pub fn id(&self) -> Option<MigrationId> {
        self.id
    }

    /// Whether the VMM may let the guest run at its operator's wish. In
    /// [`State::Held`] `cont` goes to the machine instead.
    #[must_use]
    pub fn may_guest_run(&self) -> bool {
        matches!(
            self.state,
            State::Running | State::Paused | State::Postcopy | State::PostcopyPaused | State::PostcopyRecover
        )
    }

    /// Whether pages may be missing that only the source has: it can connect
    /// again.
    #[must_use]
    pub fn lacks_pages(&self) -> bool {
        matches!(self.state, State::Postcopy | State::PostcopyPaused | State::PostcopyRecover)
    }

    /// Whether a recovery can begin now.
    #[must_use]
    pub fn may_recover(&self) -> bool {
        self.state == State::PostcopyPaused && self.postcopy.is_closed
    }

    /// Whether the guest was taken over without being started.
    #[must_use]
    pub fn is_taken_over_paused(&self) -> bool {
        self.state == State::Paused || self.may_guest_run() && self.postcopy.is_paused
    }

    /// Whether a connection that is lost now is waited for.
    #[must_use]
    pub fn would_suspend(&self) -> bool {
        let may =
            matches!(self.state, State::Active | State::Completing | State::Preparing | State::Prepared);
        may && self.reconnects
    }

    /// What the destination answers to the status question.
    #[must_use]
    pub fn status(&self, id: MigrationId) -> Status {
        if self.id != Some(id) {
            return Status::Unknown;
        }
        match self.state {
            State::Running | State::Paused => Status::Committed,
            State::Held if self.committed => Status::Committed,
            State::Postcopy | State::PostcopyPaused | State::PostcopyRecover => Status::Incomplete,
            State::Failed => Status::Never,
            _ => Status::Pending,
        }
    }

    /// Enters a state; its wait begins now.
    fn enter(&mut self, now: Duration, state: State) {
        let limits = &self.config.limits;
        let limit = match state {
            State::Setup => limits.setup,
            State::Completing => limits.load,
            State::Prepared => limits.prepared,
            State::Suspended => limits.reconnect,
            State::PostcopyRecover => limits.setup,
            _ => Duration::MAX,
        };
        self.state = state;
        self.deadline = after(now, limit);
    }
}
