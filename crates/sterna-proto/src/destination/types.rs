//! States, events, actions, outcome and refusals of the destination.

use crate::{Limits, MigrationId, Status};

/// The destination's settings, fixed before the migration starts.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Start the guest if it ran at the source. If false, the guest stays paused.
    pub autostart: bool,
    /// A manager (`sterna migrate`) controls the monitors of both sides. It sends
    /// [`Event::OperatorCont`] once a QEMU source has completed.
    pub managed: bool,
    /// Time limits of this side's waits.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self { autostart: true, managed: false, limits: Limits::default() }
    }
}

/// The destination's states. [`State::qemu_status`] returns QEMU's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits until all channels are accepted.
    Setup,
    /// Receives and loads RAM and devices.
    Active,
    /// The PREPARE ping, or EOF without a ping, was read; lanes and devices finish.
    Completing,
    /// Everything is loaded; hooks (disks, locks) are being acquired.
    Preparing,
    /// PONG was sent; waits for EOF.
    Prepared,
    /// The connection was lost, and the source will reconnect. Lanes and loader end, and hooks are
    /// given back.
    Suspending,
    /// Waits for the source; the received RAM is kept.
    Suspended,
    /// EOF was read: the guest is being started.
    Committed,
    /// The guest is here and paused. Either the manager has not confirmed yet that the source has
    /// completed, or the start failed and this is the only copy.
    Held,
    /// Postcopy: the guest runs here, or is here paused, and pages arrive.
    Postcopy,
    /// As [`State::Postcopy`], but the connection broke. A vCPU or device that needs a missing page
    /// blocks.
    PostcopyPaused,
    /// As [`State::Postcopy`], and the source has reconnected. It asks which pages are here.
    PostcopyRecover,
    /// The guest runs here. Final.
    Running,
    /// The guest is here, paused as at the source or as the operator requested. Final.
    Paused,
    /// Undoing after a failure.
    Failing,
    /// The guest does not run here and never will for this migration.
    Failed,
}

impl State {
    /// Every state, in the order of the type.
    pub const ALL: [Self; 16] = [
        Self::Setup,
        Self::Active,
        Self::Completing,
        Self::Preparing,
        Self::Prepared,
        Self::Suspending,
        Self::Suspended,
        Self::Committed,
        Self::Held,
        Self::Postcopy,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::Running,
        Self::Paused,
        Self::Failing,
        Self::Failed,
    ];

    /// QEMU's name for this state in `query-migrate` (spec §5.2).
    #[must_use]
    pub fn qemu_status(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Active
            | Self::Completing
            | Self::Preparing
            | Self::Prepared
            | Self::Suspending
            | Self::Suspended
            | Self::Committed => "active",
            Self::Postcopy => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Held | Self::Running | Self::Paused => "completed",
            Self::Failing => "failing",
            Self::Failed => "failed",
        }
    }

    /// Whether the migration is over: no event changes this state any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::Failed)
    }
}

/// Input of the destination's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// All channels are accepted.
    ChannelsReady,
    /// OPEN_RETURN_PATH was read: answers can be sent from now on.
    ReturnPathOpened,
    /// The handover section was read: the source is a Sterna.
    HandoverIdRead(MigrationId),
    /// The PREPARE ping was read. Do not answer it: [`Action::SendPong`] does.
    PrepareRead,
    /// In postcopy: the source announces which pages will be missing.
    ///
    /// From now on the received memory no longer is the memory that the source assumes. Therefore a
    /// connection that is lost before RUN ends the migration.
    PostcopyBegins,
    /// In postcopy: RUN was read. This is the commit.
    RunRead,
    /// EOF `00` was read.
    EofRead,
    /// In postcopy: the source reconnects, so it has given up the present channels.
    Superseded,
    /// The operator requests a pause of a postcopy (QMP `migrate-pause`).
    PauseRequested,
    /// [`Action::KeepWaiting`] ended: the engine feeds no event of these channels any more.
    ChannelsClosed,
    /// The main channel of a recovery is connected. If the migration has a secret, the new
    /// connection has proved that it is the migration's source.
    RecoveryBegun,
    /// In a recovery: POSTCOPY_RESUME was read.
    ResumeRead,
    /// [`Action::FinishPages`] succeeded, or [`Action::KeepWaiting`] is about to end: every page is
    /// in place.
    PagesComplete,
    /// [`Action::FinishPages`] failed: pages are missing.
    PagesFailed,
    /// [`Action::FinishLoading`] succeeded: RAM and devices are complete.
    LoadComplete {
        /// The guest ran at the source (global state, spec §1.10).
        run: bool,
    },
    /// [`Action::AcquireHooks`] succeeded: all hooks are acquired.
    HooksAcquired,
    /// [`Action::AcquireHooks`] failed; some hooks may be acquired.
    HookAcquireFailed,
    /// [`Action::StartGuest`] or [`Action::TakeOverPaused`] succeeded: the guest runs, or is here
    /// paused.
    GuestStarted,
    /// [`Action::StartGuest`] failed: the guest does not run.
    GuestStartFailed,
    /// Between two processes of one host: [`Action::StartGuest`] is about to start devices.
    ///
    /// Devices may write the memory that the source would use to resume its guest. From now on a
    /// start that fails is final here.
    MemoryMayChange,
    /// [`Action::GiveBackHooks`] succeeded: no hook is acquired any more.
    HooksGivenBack,
    /// [`Action::GiveBackHooks`] failed: some hooks are still acquired.
    HookGiveBackFailed,
    /// A channel ended or failed.
    ConnectionLost,
    /// The source broke a rule of the protocol or of its formats.
    PeerMisbehaved,
    /// The source reconnects if its connection is lost, and this side waits for it.
    MayReconnect,
    /// The source has reconnected over the channels of a new session and proved its identity. No
    /// byte of the old channels is read any more.
    Resumed,
    /// The source has proved its identity, and declared that it does not reconnect.
    SourceGaveUp,
    /// A local part failed (a device's load, memory, a thread).
    LocalFailure,
    /// The source asks over a new connection for this migration's outcome.
    StatusAsked(MigrationId),
    /// QMP `cont` for a guest that is [`State::Held`].
    ///
    /// The operator vouches that the source has completed, so that the guest runs nowhere else.
    OperatorCont,
    /// The operator gives the incoming migration up.
    ///
    /// Refused if that could lose the guest: see [`Event::Discard`].
    Abandon,
    /// As [`Event::Abandon`], and a guest that is [`State::Held`] is discarded too. The operator
    /// vouches that it is not the only copy, or not needed.
    Discard,
    /// The time has advanced; due at [`super::Destination::deadline`].
    Tick,
}

/// Output of the destination's machine: the engine performs these in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Wait for all lanes and devices to finish. Ends in
    /// [`Event::LoadComplete`] (or `LocalFailure`, `PeerMisbehaved`).
    FinishLoading,
    /// Acquire the disks and locks that are not acquired yet. Ends in [`Event::HooksAcquired`] or
    /// `HookAcquireFailed`.
    AcquireHooks,
    /// Answer the PREPARE ping with PONG.
    SendPong,
    /// Start the guest. Ends in [`Event::GuestStarted`] or `GuestStartFailed`.
    ///
    /// In postcopy the start may block on a missing page, so the engine performs other actions in
    /// parallel.
    StartGuest,
    /// In postcopy: take the guest over without starting it. Ends in [`Event::GuestStarted`].
    ///
    /// As [`Action::StartGuest`] it may block on a missing page, so the engine performs other
    /// actions in parallel.
    TakeOverPaused,
    /// In postcopy: report to the source that the guest was started, or taken over paused.
    SayStarted,
    /// In postcopy: wait until every page is in place. Ends in [`Event::PagesComplete`] or
    /// `PagesFailed`.
    FinishPages,
    /// In postcopy: stop receiving pages and close the channels. Threads that need a missing page
    /// stay blocked.
    ///
    /// Ends in [`Event::ChannelsClosed`]. If the received pages were all pages,
    /// [`Event::PagesComplete`] precedes it.
    KeepWaiting,
    /// In a recovery: receive over the new channels, and report which pages are here.
    Recover,
    /// In a recovery: confirm to the source that this side continues. Request again the pages on
    /// which threads are blocked.
    SayResumed,
    /// Announce the guest's network addresses from this host.
    AnnounceNetwork,
    /// Send SHUT with this value. If it cannot be sent, the source will ask for the status.
    SendShut(u32),
    /// Answer [`Event::StatusAsked`] on the connection that asked.
    Answer(Status),
    /// Report to the operator that the guest is held, and why.
    ReportHeld(Held),
    /// Stop every lane and load thread. Returns only when no thread writes guest RAM any more. The
    /// return path stays usable if it was usable before.
    StopLoading,
    /// Close this session's channels, which no thread reads any more, and drop the received device
    /// state. RAM stays as it is. From now on the source may reconnect, which is
    /// [`Event::Resumed`].
    Suspend,
    /// Give the acquired hooks back, the last first. Ends in [`Event::HooksGivenBack`] or
    /// `HookGiveBackFailed`.
    GiveBackHooks,
    /// Close all channels; the bytes that were queued on them are still sent.
    CloseChannels,
    /// Reset the VM and free the memory that was loaded.
    ResetMemory,
    /// The migration is over. Keep the machine to answer status questions.
    Finish(Outcome),
}

/// The reason why the guest is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    /// A QEMU source has not completed yet: it would resume the guest if it missed SHUT.
    UntilSourceCompleted,
    /// Hooks could not be acquired, and no return path exists to report it.
    ///
    /// The only copy is here. `cont` retries.
    Hooks,
    /// The start failed, and the only copy is here.
    ///
    /// The source has completed, or its memory may have been written here. `cont` retries.
    Start,
    /// Postcopy, and the connection broke: pages that only the source has are missing.
    Pages,
    /// Postcopy, and the start failed after the source learned that this side has the guest. The
    /// guest is here, paused.
    StartInPostcopy,
}

/// The reason of a failed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A channel ended or failed: [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an element at a wrong time.
    PeerMisbehaved,
    /// A local part failed: [`Event::LocalFailure`].
    LocalFailure,
    /// A hook could not be acquired: [`Event::HookAcquireFailed`].
    HookAcquire,
    /// The guest could not be started: [`Event::GuestStartFailed`].
    GuestStart,
    /// The source did not reconnect in time after a loss, or declared that it does not.
    NotResumed,
    /// The operator gave the migration up: [`Event::Abandon`] or [`Event::Discard`].
    Abandoned,
    /// The wait in this state reached its limit.
    TimedOut(State),
}

/// The result of the migration at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here.
    Running,
    /// The guest is here, paused.
    Paused,
    /// The guest does not run here and never will.
    Failed {
        /// The reason of the failure.
        cause: Cause,
        /// Some hooks could not be given back, so the source may be unable to acquire them.
        hooks_left_held: bool,
    },
}

/// Why the machine refused an event. A refusal does not change the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An abandon after EOF.
    #[error(
        "cannot abandon: the guest has been handed over to this side ({state:?}); \
         stop it here, or migrate it back"
    )]
    AbandonAfterCommit {
        /// The state of the destination.
        state: State,
    },
    /// An abandon while the guest is held.
    #[error(
        "the guest is held here, and this may be its only copy, because its source may have completed the migration. \
         Check the source. If the guest does not run there, start it here with 'cont'. If it runs there, or is no \
         longer needed, discard it here with 'sterna cancel --force' ('migrate_cancel' with \"x-sterna-force\": true \
         through QMP)"
    )]
    MayBeOnlyCopy,
    /// An abandon while pages are missing.
    #[error(
        "the guest runs here and lacks pages that only its source has, so one side alone cannot discard it. If the \
         guest is no longer needed, end this process, and decide destination-runs at the source"
    )]
    LacksPages,
    /// An abandon after the migration has failed.
    #[error("nothing to abandon: the incoming migration has failed; start a new one")]
    NothingToAbandon,
    /// A request for recovery in a state other than postcopy-paused.
    #[error(
        "only a guest in postcopy-paused can be recovered, but the state is {}; {}",
        state.qemu_status(),
        if state.is_final() && *state != State::Failed {
            "every page has arrived: this side answers the source's question, or decide destination-runs there"
        } else {
            "'query-migrate' shows the result"
        }
    )]
    NotPostcopyPaused {
        /// The state of the destination.
        state: State,
    },
    /// A request for a pause in a state without a running postcopy.
    #[error(
        "migrate-pause works only in postcopy-active and postcopy-recover, but the state is {}",
        state.qemu_status()
    )]
    NotPostcopyActive {
        /// The state of the destination.
        state: State,
    },
    /// `cont` while the guest is not held.
    #[error("cont: the incoming guest is not held in state {state:?}; it can run only after its arrival")]
    NotHeld {
        /// The state of the destination.
        state: State,
    },
    /// The event is impossible in this state, which is a fault of the engine.
    #[error(
        "{event:?} cannot happen in state {state:?}: the engine passed events to the state machine in the wrong \
             order"
    )]
    OutOfOrder {
        /// The state of the destination.
        state: State,
        /// The event that was fed.
        event: Event,
    },
}
