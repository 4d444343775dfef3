//! The destination's handover machine: decides when the guest starts here, and which answer is
//! final.
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
//! In postcopy, RUN takes the place of EOF as the commit. Postcopy follows Committed, and Running
//! (or Paused) follows when EOF and every page have arrived. A loss before RUN fails the migration,
//! as before EOF. A loss after RUN leads to PostcopyPaused: a vCPU that touches a missing page
//! blocks until the source reconnects. PostcopyRecover leads back to Postcopy. If no page is
//! missing, only the end was lost, and Running (or Paused) follows.
//!
//! The start itself may block on a missing page. Therefore a loss in Committed leads to
//! PostcopyPaused too, and the start continues there. If the start fails there, the guest returns
//! to the source (*never*). If the source may already know that this side has the guest, the guest
//! is instead taken over paused.
//!
//! * `table.rs` contains every transition.
//! * An answer to the source is final. *Committed* and SHUT 0 are sent only when the guest has been
//!   started, taken over paused, or is permanently held here. *Never* and SHUT 1 are sent only in
//!   [`State::Failed`], which is a final state. At that time the hooks are given back (or could not
//!   be given back), so that the source can acquire them. Between EOF and the start the answer is
//!   *pending*, because the start can still fail.
//! * Two processes on one host share one copy of the memory. A start that fails after devices of
//!   this side may have written that memory is final. The destination then sends SHUT 0, so that
//!   the source releases the memory, and the guest is in [`State::Held`].
//! * A loss of the connection before EOF fails the migration. After EOF it changes nothing.
//! * After EOF, if no return path exists to report a failure, this side has the only copy. It keeps
//!   the copy in [`State::Held`] and does not reset it.

mod table;
mod types;

pub use types::{Action, Cause, Config, Event, Held, Outcome, Refusal, State};

use crate::limits::after;
use crate::{MigrationId, Status};
use std::time::Duration;

/// The destination's machine, one per migration; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Destination {
    config: Config,
    state: State,
    deadline: Option<Duration>,
    return_path: bool,
    id: Option<MigrationId>,
    /// The source has sent the PREPARE ping.
    prepares: bool,
    /// EOF was read, and no PREPARE ping preceded it.
    ended: bool,
    /// The guest ran at the source.
    run: bool,
    hooks: Hooks,
    /// SHUT 0 was sent, or would have been sent if there were a return path.
    committed: bool,
    /// The source reconnects if this connection is lost.
    reconnects: bool,
    /// Devices of this side may have written memory that the source would use to resume.
    may_have_written: bool,
    /// `cont` was requested while hooks were missing.
    conts: bool,
    postcopy: Postcopy,
    cause: Option<Cause>,
}

/// State of a guest that runs before all of its pages have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Postcopy {
    /// RUN was read, which is the commit in postcopy.
    is_on: bool,
    /// EOF was read after RUN.
    has_ended: bool,
    /// The start, or the taking over, has begun and not ended. It may block on a missing page.
    is_starting: bool,
    /// Every page is in place, but the start has not ended.
    is_whole: bool,
    /// The source may know that this side has the guest. A start that fails then does not return
    /// the guest.
    is_said: bool,
    /// The guest was taken over paused.
    is_paused: bool,
    /// In a pause: the engine feeds no event of the lost channels any more.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hooks {
    None,
    Acquiring,
    /// Some or all hooks are acquired.
    Held,
    GivingBack,
    Stuck,
}

impl Destination {
    /// A machine in [`State::Setup`], created when the last channel is accepted.
    ///
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
            may_have_written: false,
            conts: false,
            postcopy: Postcopy::default(),
            cause: None,
        };
        machine.enter(now, State::Setup);
        machine
    }

    /// Reports an event to the machine. The engine performs the returned actions in order.
    ///
    /// # Errors
    /// [`Refusal`] if the event is impossible in this state; the machine did not change.
    pub fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, Refusal> {
        self.step(now, event)
    }

    /// The present state; only [`Destination::handle`] changes it.
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

    /// The migration's id; `None` until a Sterna source has sent it.
    #[must_use]
    pub fn id(&self) -> Option<MigrationId> {
        self.id
    }

    /// Whether the VMM may run the guest at its operator's request.
    ///
    /// In [`State::Held`] the VMM passes `cont` to the machine instead.
    #[must_use]
    pub fn may_guest_run(&self) -> bool {
        let is_here = matches!(
            self.state,
            State::Running | State::Paused | State::Postcopy | State::PostcopyPaused | State::PostcopyRecover
        );
        is_here && !self.postcopy.is_starting
    }

    /// Whether a postcopy guest is being started or taken over. This may block on a missing page.
    #[must_use]
    pub fn starts_in_postcopy(&self) -> bool {
        self.postcopy.is_starting
    }

    /// Whether pages may be missing that only the source has, so that the source can reconnect.
    #[must_use]
    pub fn lacks_pages(&self) -> bool {
        matches!(self.state, State::Postcopy | State::PostcopyPaused | State::PostcopyRecover)
    }

    /// Whether a recovery can begin now.
    #[must_use]
    pub fn may_recover(&self) -> bool {
        self.state == State::PostcopyPaused && self.postcopy.is_closed
    }

    /// Whether this action, which was begun and interrupted by another one, must still be performed.
    ///
    /// Only [`Action::FinishLoading`] and [`Action::FinishPages`] wait, so only they can be
    /// interrupted. Most actions do not end the wait's reason, for example a message to the source.
    #[must_use]
    pub fn is_still_due(&self, action: Action) -> bool {
        match action {
            Action::FinishLoading => self.state == State::Completing,
            Action::FinishPages => self.gets_pages(self.state) && self.postcopy.has_ended,
            _ => false,
        }
    }

    /// Whether the guest was taken over without being started.
    #[must_use]
    pub fn is_taken_over_paused(&self) -> bool {
        self.state == State::Paused || self.may_guest_run() && self.postcopy.is_paused
    }

    /// Whether this side would wait for the source if the connection were lost now.
    #[must_use]
    pub fn would_suspend(&self) -> bool {
        let may =
            matches!(self.state, State::Active | State::Completing | State::Preparing | State::Prepared);
        may && self.reconnects
    }

    /// The answer to the status question for the migration `id`.
    #[must_use]
    pub fn status(&self, id: MigrationId) -> Status {
        if self.id != Some(id) {
            return Status::Unknown;
        }
        match self.state {
            State::Running | State::Paused => Status::Committed,
            // Also for a guest that was discarded later, because the source's copy is out of date
            // in any case.
            State::Held | State::Failed if self.committed => Status::Committed,
            State::Postcopy | State::PostcopyPaused | State::PostcopyRecover => Status::Incomplete,
            State::Failed => Status::Never,
            _ => Status::Pending,
        }
    }

    /// Breaks the machine on purpose for a test of the simulator.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn forget_what_it_said(&mut self) {
        self.postcopy.is_said = false;
    }

    /// Enters a state; the state's wait begins now.
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
