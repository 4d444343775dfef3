//! States, events, actions, outcome and refusals of the destination.

use crate::{Limits, MigrationId, Status};

/// What the destination must know before it starts.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Start the guest if it ran at the source; otherwise it is left paused.
    pub autostart: bool,
    /// Somebody (`sterna migrate`) holds the monitors of both sides and will
    /// say [`Event::OperatorCont`] once a QEMU source has completed.
    pub managed: bool,
    /// Limits of the waits.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self { autostart: true, managed: false, limits: Limits::default() }
    }
}

/// Where the destination stands. [`State::qemu_status`] gives QEMU's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits for the channels.
    Setup,
    /// Loads.
    Active,
    /// The PREPARE ping, or EOF without one, was read; lanes and devices
    /// finish.
    Completing,
    /// All is loaded; hooks (disks, locks) are being acquired.
    Preparing,
    /// PONG was sent; waits for EOF.
    Prepared,
    /// The connection was lost, and the source will come back: lanes and loader end, and hooks are given back.
    Suspending,
    /// Waits for the source; what came of RAM is kept.
    Suspended,
    /// EOF was read: the guest is being started.
    Committed,
    /// Everything is here and the guest waits, paused, until it is told that
    /// the source has completed; or its start failed and this is the only copy.
    Held,
    /// Postcopy: the guest runs here, or is here paused, and pages come.
    Postcopy,
    /// The same, and the connection broke: whoever needs a missing page waits.
    PostcopyPaused,
    /// The same, and the source has connected again: it asks which pages are
    /// here.
    PostcopyRecover,
    /// The guest runs here.
    Running,
    /// The guest is here, paused as it was at the source or as was wished.
    Paused,
    /// Undoing.
    Failing,
    /// The guest does not run here and never will for this migration.
    Failed,
}

impl State {
    /// Every state, in order.
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

    /// Whether the migration is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::Failed)
    }
}

/// What the destination is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// All channels are accepted.
    ChannelsReady,
    /// OPEN_RETURN_PATH was read.
    ReturnPathOpened,
    /// The handover section was read: the source is a Sterna.
    HandoverIdRead(MigrationId),
    /// The PREPARE ping was read. Do not answer it: [`Action::SendPong`] does.
    PrepareRead,
    /// In postcopy: the source says which pages will be missing. From now on what came of memory is no longer what the
    /// source believes, so a connection that is lost before RUN ends the migration.
    PostcopyBegins,
    /// In postcopy: RUN was read. The commit.
    RunRead,
    /// EOF `00` was read.
    EofRead,
    /// In postcopy: the source connects again, so it has given the channels up
    /// that are here.
    Superseded,
    /// The operator wants a postcopy to stand still (QMP `migrate-pause`).
    PauseRequested,
    /// [`Action::KeepWaiting`] ended: nothing of these channels is fed any
    /// more.
    ChannelsClosed,
    /// The main channel of a recovery is here. Who brings it has proved to be
    /// the migration's source, if that has a secret.
    RecoveryBegun,
    /// In a recovery: POSTCOPY_RESUME was read.
    ResumeRead,
    /// [`Action::FinishPages`] ended, or [`Action::KeepWaiting`] is about to: every page is in place.
    PagesComplete,
    /// [`Action::FinishPages`] failed: pages are missing.
    PagesFailed,
    /// [`Action::FinishLoading`] ended: RAM and devices are complete.
    LoadComplete {
        /// The guest ran at the source (global state, spec §1.10).
        run: bool,
    },
    /// [`Action::AcquireHooks`] ended: all are held.
    HooksAcquired,
    /// [`Action::AcquireHooks`] failed; some may be held.
    HookAcquireFailed,
    /// [`Action::StartGuest`] ended: the guest runs.
    GuestStarted,
    /// [`Action::StartGuest`] failed: the guest does not run.
    GuestStartFailed,
    /// [`Action::GiveBackHooks`] ended: none is held.
    HooksGivenBack,
    /// [`Action::GiveBackHooks`] failed: some are still held.
    HookGiveBackFailed,
    /// A channel ended or failed.
    ConnectionLost,
    /// The source broke a rule of the format.
    PeerMisbehaved,
    /// The source comes back if its connection is lost, and this side waits for it.
    MayReconnect,
    /// The source has proved that it is back, over the channels of a new session; nothing of the old ones is read any more.
    Resumed,
    /// The source has proved that it is itself, and said that it does not come back.
    SourceGaveUp,
    /// Something of ours failed (a device's load, memory, a thread).
    LocalFailure,
    /// The source asks over a new connection what became of this migration.
    StatusAsked(MigrationId),
    /// QMP `cont` for a guest that is [`State::Held`]: the source has
    /// completed, so that the guest runs nowhere else.
    OperatorCont,
    /// The operator gives the incoming migration up. Refused where that could lose the guest: see
    /// [`Event::Discard`].
    Abandon,
    /// As [`Event::Abandon`], and a guest that is [`State::Held`] goes, too: the operator says that it is not the only
    /// copy, or not wanted.
    Discard,
    /// Time has passed; due at [`super::Destination::deadline`].
    Tick,
}

/// What the engine shall do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Wait for all lanes and devices to finish. Ends in
    /// [`Event::LoadComplete`] (or `LocalFailure`, `PeerMisbehaved`).
    FinishLoading,
    /// Acquire disks and locks (those not yet held). Ends in
    /// [`Event::HooksAcquired`] or `HookAcquireFailed`.
    AcquireHooks,
    /// Answer the PREPARE ping.
    SendPong,
    /// Start the guest. Ends in [`Event::GuestStarted`] or `GuestStartFailed`.
    StartGuest,
    /// In postcopy: tell the source that the guest was started, or taken over
    /// paused.
    SayStarted,
    /// In postcopy: wait until every page is in place. Ends in
    /// [`Event::PagesComplete`] or `PagesFailed`.
    FinishPages,
    /// In postcopy: stop receiving pages, and leave whoever waits for a missing
    /// one waiting. Close the channels. Ends in [`Event::ChannelsClosed`], with [`Event::PagesComplete`] before it
    /// if what had come was all.
    KeepWaiting,
    /// In a recovery: receive over the new channels, and answer which pages are
    /// here.
    Recover,
    /// In a recovery: tell the source that this side goes on, and ask again for
    /// the pages that are waited for.
    SayResumed,
    /// Announce the guest's network addresses from here.
    AnnounceNetwork,
    /// Send SHUT with this value; if it cannot be sent, the source will ask.
    SendShut(u32),
    /// Answer [`Event::StatusAsked`] on the connection that asked.
    Answer(Status),
    /// Tell the operator that the guest is held, and why.
    ReportHeld(Held),
    /// Stop every lane and load thread, and return only when none writes guest
    /// RAM any more. The return path stays usable if it still is.
    StopLoading,
    /// Close this session's channels, which nobody reads any more, and forget what came of devices. RAM stays as it is. From
    /// now on the source may come back, which is [`Event::Resumed`].
    Suspend,
    /// Give the hooks that are held back, last first. Ends in
    /// [`Event::HooksGivenBack`] or `HookGiveBackFailed`.
    GiveBackHooks,
    /// Close all channels; what was sent on them still goes out.
    CloseChannels,
    /// Reset the VM and free the memory that was loaded.
    ResetMemory,
    /// The migration is over. Keep the machine to answer status questions.
    Finish(Outcome),
}

/// Why the guest is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    /// Until a QEMU source has completed: it would resume if it missed SHUT.
    UntilSourceCompleted,
    /// Hooks could not be acquired and the source cannot be told: the only
    /// copy is here. `cont` tries again.
    Hooks,
    /// The start failed and the source has completed: the only copy is here.
    /// `cont` tries again.
    Start,
    /// Postcopy, and the connection broke: pages that only the source has are
    /// missing.
    Pages,
}

/// Why the migration failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an element at a wrong time.
    PeerMisbehaved,
    /// [`Event::LocalFailure`].
    LocalFailure,
    /// [`Event::HookAcquireFailed`].
    HookAcquire,
    /// [`Event::GuestStartFailed`].
    GuestStart,
    /// The connection was lost, and the source did not come back in time, or said that it does not.
    NotResumed,
    /// [`Event::Abandon`] or [`Event::Discard`].
    Abandoned,
    /// The wait in this state was over its limit.
    TimedOut(State),
}

/// How the migration ended at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here.
    Running,
    /// The guest is here, paused.
    Paused,
    /// The guest does not run here and never will.
    Failed {
        /// Why.
        cause: Cause,
        /// Some hooks could not be given back: the source may miss them.
        hooks_left_held: bool,
    },
}

/// Why an event was refused; the machine did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Abandon after EOF.
    #[error(
        "cannot abandon: the guest has been handed over to this side ({state:?}); \
         stop it here, or migrate it back"
    )]
    AbandonAfterCommit {
        /// Where the destination stands.
        state: State,
    },
    /// Abandon while the guest is held.
    #[error(
        "the guest is held here, and this may be its only copy: its source may have completed and forgotten it, and a \
         guest that is discarded cannot be brought back. Look at the source: unless its migration has failed and the \
         guest runs there, start it here with 'cont'. If it runs there, or nobody wants it any more, discard it by force \
         ('sterna cancel --force', or 'migrate_cancel' with \"x-sterna-force\": true through QMP)"
    )]
    MayBeOnlyCopy,
    /// Abandon while pages are missing.
    #[error(
        "the guest runs here and lacks pages that only its source has, which keeps them: it cannot be given up on one side. \
         If it is not wanted any more, end this process, and say destination-runs at the source"
    )]
    LacksPages,
    /// Abandon when it has failed already.
    #[error("nothing to abandon: the incoming migration has failed; start a new one")]
    NothingToAbandon,
    /// A recovery when there is nothing to recover.
    #[error(
        "only a guest in postcopy-paused can be recovered, the state is {}; {}",
        state.qemu_status(),
        if state.is_final() && *state != State::Failed {
            "every page is here: the source is told so when it asks, or decide destination-runs there"
        } else {
            "'query-migrate' shows what became of it"
        }
    )]
    NotPostcopyPaused {
        /// Where the destination stands.
        state: State,
    },
    /// A pause when there is nothing to pause.
    #[error(
        "migrate-pause works only in postcopy-active and postcopy-recover, the state is {}",
        state.qemu_status()
    )]
    NotPostcopyActive {
        /// Where the destination stands.
        state: State,
    },
    /// `cont` when the guest is not held.
    #[error("cont: the incoming guest is not held in state {state:?}; before it is here it cannot run")]
    NotHeld {
        /// Where the destination stands.
        state: State,
    },
    /// The event cannot happen in this state: the engine's fault.
    #[error("{event:?} cannot happen in state {state:?}: the engine fed the machine out of order")]
    OutOfOrder {
        /// Where the destination stands.
        state: State,
        /// What it was told.
        event: Event,
    },
}
