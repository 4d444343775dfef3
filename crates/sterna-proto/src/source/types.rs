//! States, events, actions, outcome and refusals of the source.

use crate::{Limits, Status};

/// How many acknowledgements must come before switching over (spec §5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SwitchoverAck {
    /// Capability off: none may come.
    #[default]
    Off,
    /// Machine types up to 11.0: exactly one must come.
    Legacy,
    /// From 11.1: one for each [`Event::DeviceAsksAck`].
    Modern,
}

/// What the source must know before it starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// The peer can answer on the main channel. Without it there is neither
    /// prepare nor acknowledgement: see the crate's documentation.
    pub return_path: bool,
    /// The VM has a compatibility record for a Sterna peer to accept.
    pub compatibility: bool,
    /// Capability `pause-before-switchover`.
    pub pause_before_switchover: bool,
    /// Capability `switchover-ack` and its form.
    pub switchover_ack: SwitchoverAck,
    /// The destination is a standby: the guest stays here, and the migration
    /// is the seeding of its protection. There is neither prepare nor commit.
    pub protects: bool,
    /// Capability `postcopy-ram`: [`Event::PostcopyRequested`] may come.
    pub postcopy: bool,
    /// Limits of the waits.
    pub limits: Limits,
}

/// What the answer to the extension pings said about the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Peer {
    /// A Sterna: knows the handover section and the status question.
    pub sterna: bool,
    /// Its feature bits; 0 for a QEMU.
    pub features: u16,
}

/// Where the source stands. [`State::qemu_status`] gives QEMU's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits for the channels.
    Setup,
    /// Waits for the peer's answers to the extension pings.
    Identifying,
    /// Waits for a Sterna peer to accept the compatibility record.
    Comparing,
    /// Precopy: RAM moves while the guest runs.
    Active,
    /// The guest is being stopped.
    Stopping,
    /// The guest is stopped; waits for the operator's `migrate-continue`.
    PreSwitchover,
    /// Hooks (disks, locks) are being released.
    Releasing,
    /// The last RAM and the devices' state are being sent.
    Switchover,
    /// All of a seeding is being sent, its EOF with it; waits for SHUT. EOF
    /// commits nothing: a standby runs no guest from a seeding alone.
    Seeding,
    /// The standby holds the seeding, and the guest goes on here. Who may run
    /// it is decided by the machines of [`crate::replica`]; here nothing ends
    /// the protection but [`Event::ProtectionEnded`].
    Protected,
    /// The PREPARE ping was sent; waits for its PONG.
    Preparing,
    /// The connection was lost, and another one will be made: what the switchover had begun is being undone, and the guest
    /// runs on.
    Suspending,
    /// The guest runs here, its writes are tracked, and the source connects again.
    Reconnecting,
    /// Committed: EOF, in postcopy RUN, is being handed to the transport.
    Committing,
    /// EOF was sent; waits for SHUT. In postcopy RUN was sent; waits to hear
    /// that the guest was started.
    AwaitingAck,
    /// The destination runs the guest, or has it paused, and gets its pages.
    Postcopy,
    /// The same, and the connection broke: here the guest's memory is kept.
    PostcopyPaused,
    /// The same, and the source connects again: it asks which pages the
    /// destination has, and tells it to go on.
    PostcopyRecover,
    /// Committed, and nobody knows whether the destination runs the guest:
    /// asks again. The guest stays stopped.
    Undecided,
    /// Undoing after a cancel.
    Cancelling,
    /// Undoing after a failure.
    Failing,
    /// Cancelled or failed, but the undoing failed as well: the guest is held
    /// stopped until [`Event::OperatorRetry`].
    Held,
    /// The destination has the guest.
    Completed,
    /// Undone; the guest is as it was.
    Cancelled,
    /// Undone; the guest is as it was.
    Failed,
}

impl State {
    /// Every state, in order.
    pub const ALL: [Self; 25] = [
        Self::Setup,
        Self::Identifying,
        Self::Comparing,
        Self::Active,
        Self::Stopping,
        Self::PreSwitchover,
        Self::Releasing,
        Self::Switchover,
        Self::Seeding,
        Self::Protected,
        Self::Preparing,
        Self::Suspending,
        Self::Reconnecting,
        Self::Committing,
        Self::AwaitingAck,
        Self::Postcopy,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::Undecided,
        Self::Cancelling,
        Self::Failing,
        Self::Held,
        Self::Completed,
        Self::Cancelled,
        Self::Failed,
    ];

    /// QEMU's name for this state in `query-migrate` (spec §5.1).
    #[must_use]
    pub fn qemu_status(self) -> &'static str {
        match self {
            Self::Setup | Self::Identifying | Self::Comparing => "setup",
            Self::Active | Self::Stopping | Self::Suspending | Self::Reconnecting => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Releasing
            | Self::Switchover
            | Self::Seeding
            | Self::Preparing
            | Self::Committing
            | Self::AwaitingAck
            | Self::Undecided => "device",
            Self::Postcopy => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Protected => "colo",
            Self::Cancelling => "cancelling",
            Self::Failing => "failing",
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Held | Self::Failed => "failed",
        }
    }

    /// Whether the commit lies behind: cancelling is refused. `Failing` is not
    /// among them although it may follow a commit that came to nothing.
    #[must_use]
    pub fn is_committed(self) -> bool {
        matches!(
            self,
            Self::Committing
                | Self::AwaitingAck
                | Self::Postcopy
                | Self::PostcopyPaused
                | Self::PostcopyRecover
                | Self::Undecided
                | Self::Completed
        )
    }

    /// Whether only a migration enters it whose destination is a standby.
    #[must_use]
    pub fn is_of_protection(self) -> bool {
        matches!(self, Self::Seeding | Self::Protected)
    }

    /// Whether nothing happens any more without a new migration.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Cancelled | Self::Failed)
    }
}

/// Who shall run the guest of an undecided migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The operator vouches that the destination does not and never will.
    SourceRuns,
    /// The destination does: the source gives the guest up.
    DestinationRuns,
}

/// What the source is told. Times and causes in full stay with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// All channels are connected.
    ChannelsReady,
    /// [`Action::Identify`] ended.
    PeerIdentified(Peer),
    /// [`Action::Compare`] ended: the PONG of the compatibility ping came.
    CompatibilityAccepted,
    /// A device of ours asks that the destination acknowledge the switchover.
    DeviceAsksAck,
    /// SWITCHOVER_ACK was read.
    SwitchoverAck,
    /// What remains fits the downtime: switch over.
    SwitchoverRequested {
        /// The guest runs. A paused one does not wait for acknowledgements.
        guest_running: bool,
    },
    /// As [`Event::SwitchoverRequested`], and what remains follows the guest:
    /// postcopy. Only with [`Config::postcopy`] and a return path.
    PostcopyRequested {
        /// The guest runs.
        guest_running: bool,
    },
    /// [`Action::StopGuest`] ended: the guest is stopped.
    GuestStopped {
        /// It ran before, and shall run again if the migration fails.
        was_running: bool,
    },
    /// [`Action::StopGuest`] failed, and the VM has undone what it had begun:
    /// the guest goes on as before.
    GuestStopFailed,
    /// QMP `migrate-continue` for the state pre-switchover.
    OperatorContinue,
    /// [`Action::ReleaseHooks`] ended.
    HooksReleased,
    /// [`Action::ReleaseHooks`] failed; some hooks may have been released.
    HookReleaseFailed,
    /// [`Action::SendFinalState`] ended.
    FinalStateSent,
    /// The PONG of the PREPARE ping was read.
    PrepareAcknowledged,
    /// [`Action::SendEof`] or [`Action::SendRun`] ended: all bytes are with
    /// the transport.
    EofSent,
    /// [`Action::SendEof`] or [`Action::SendRun`] failed; bytes may have gone
    /// out.
    EofFailed,
    /// In postcopy: the destination says that it has started the guest, or
    /// taken it over paused.
    DestinationStarted,
    /// In postcopy: every page and EOF are about to go out.
    PagesSent,
    /// [`Action::CloseChannels`] ended: nothing of these channels is fed any
    /// more.
    ChannelsClosed,
    /// The operator wants a paused postcopy to go on (QMP `migrate` with
    /// `resume`).
    ResumeRequested,
    /// The operator wants a postcopy to stand still (QMP `migrate-pause`).
    PauseRequested,
    /// In a recovery: the destination goes on.
    ResumeAcknowledged,
    /// SHUT was read.
    Shut(u32),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the format.
    PeerMisbehaved,
    /// Something of ours failed (tracking, a device's save, a thread).
    LocalFailure,
    /// The destination has answered [`Action::AskAgain`].
    AskAnswered(Status),
    /// [`Action::AskAgain`] brought no answer.
    AskFailed,
    /// Both sides can go on over another connection if this one is lost.
    MayReconnect,
    /// [`Action::Reconnect`] ended: the channels of a new session are up, and the destination has said what it holds.
    Reconnected,
    /// [`Action::Reconnect`] brought no connection.
    ReconnectFailed,
    /// The destination has answered [`Action::Reconnect`]: it does not go on with this migration.
    ReconnectRefused,
    /// QMP `migrate_cancel`.
    Cancel,
    /// The guest of a protection stands, by the word of the protection's own
    /// machine: no operator may let it run.
    GuestWithheld {
        /// It ran before.
        was_running: bool,
    },
    /// It is its operator's again.
    GuestGivenBack,
    /// The protection is over.
    ProtectionEnded {
        /// The guest stays here; else the standby has it.
        guest_is_here: bool,
    },
    /// The operator ends an undecided migration.
    OperatorDecides(Decision),
    /// [`Action::ReacquireHooks`] ended: all hooks are held again.
    HooksReacquired,
    /// [`Action::ReacquireHooks`] failed: some are missing.
    HooksReacquireFailed,
    /// [`Action::ResumeGuest`] ended.
    GuestResumed,
    /// [`Action::ResumeGuest`] failed: the guest is stopped.
    GuestResumeFailed,
    /// [`Action::StopTracking`] ended.
    TrackingStopped,
    /// [`Action::StopTracking`] failed.
    TrackingStopFailed,
    /// QMP `cont` for a guest that is [`State::Held`].
    OperatorRetry,
    /// Time has passed; due at [`super::Source::deadline`].
    Tick,
}

/// What the engine shall do, in this order. Actions named in an event's
/// documentation report their end through it; the others need not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Open the return path, send the extension pings and the fence, wait for
    /// the fence's PONG. Ends in [`Event::PeerIdentified`].
    Identify,
    /// Send the handover section: the peer is a Sterna.
    SendHandoverId,
    /// Send the compatibility record and its ping. Ends in
    /// [`Event::CompatibilityAccepted`].
    Compare,
    /// Start dirty tracking and precopy. Ends in
    /// [`Event::SwitchoverRequested`], possibly several times.
    StartPrecopy,
    /// Stop the guest. Ends in [`Event::GuestStopped`] or `GuestStopFailed`.
    StopGuest,
    /// Release disks and locks. Ends in [`Event::HooksReleased`] or
    /// `HookReleaseFailed`.
    ReleaseHooks,
    /// SWITCHOVER_START, last RAM, devices. Ends in [`Event::FinalStateSent`]
    /// (or `ConnectionLost`, `LocalFailure`).
    SendFinalState,
    /// Send the PREPARE ping. Its PONG is [`Event::PrepareAcknowledged`].
    SendPrepare,
    /// Send EOF and the description. The commit has happened. Ends in
    /// [`Event::EofSent`] or `EofFailed`.
    SendEof,
    /// In postcopy: send what lets the destination start the guest. The commit
    /// has happened. Ends in [`Event::EofSent`] or `EofFailed`.
    SendRun,
    /// In postcopy: send all pages that remain, those first that the
    /// destination asks for. Ends in [`Event::PagesSent`], EOF, and then
    /// [`Event::Shut`].
    SendPages,
    /// In postcopy: connect again, learn which pages the destination has, and
    /// tell it to go on. Ends in [`Event::ResumeAcknowledged`] (or
    /// `ConnectionLost`, `PeerMisbehaved`, `LocalFailure`).
    Recover,
    /// Tell the operator that nobody knows who runs the guest, and what to do.
    ReportUndecided(Cause),
    /// Tell the operator that the destination runs the guest and may lack
    /// pages, which are kept here.
    ReportPaused(Cause),
    /// Take checkpoints of the guest and send them, until the protection ends.
    TakeCheckpoints,
    /// Ask a new connection for the migration's status, giving up an older
    /// question. Ends in [`Event::AskAnswered`] or `AskFailed`.
    AskAgain,
    /// Shut every channel down, and return only when no thread of this
    /// migration sends, or reads guest RAM, any more.
    CloseChannels,
    /// Shut every channel down, as [`Action::CloseChannels`] does; the migration goes on over others. No event of these
    /// channels may be fed once this is done.
    BreakOff,
    /// Try once to connect again. Ends in [`Event::Reconnected`], `ReconnectFailed` or `ReconnectRefused`.
    Reconnect,
    /// Go on with precopy over the new channels: what the destination lacks, and what was written since. Ends as
    /// [`Action::StartPrecopy`].
    ResumePrecopy,
    /// Re-acquire in reverse order the hooks that are released. Ends in
    /// [`Event::HooksReacquired`] or `HooksReacquireFailed`.
    ReacquireHooks,
    /// Let the guest run. Ends in [`Event::GuestResumed`] or
    /// `GuestResumeFailed`.
    ResumeGuest,
    /// Stop dirty tracking. Ends in [`Event::TrackingStopped`] or
    /// `TrackingStopFailed` (of no interest after `Completed`).
    StopTracking,
    /// The migration is over. Comes once more when a held guest was freed.
    Finish(Outcome),
}

/// Why a migration ended early or became undecided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an answer that was not due.
    PeerMisbehaved,
    /// [`Event::LocalFailure`].
    LocalFailure,
    /// [`Event::GuestStopFailed`].
    GuestStop,
    /// [`Event::HookReleaseFailed`].
    HookRelease,
    /// [`Event::EofFailed`].
    Eof,
    /// The destination said SHUT with this value, not 0.
    DestinationFailed(u32),
    /// The destination answered that it never runs the guest.
    DestinationNever,
    /// The connection was lost, and no other one could be made in time, or the destination does not go on.
    NotReconnected,
    /// The operator decided that the source runs the guest.
    OperatorDecided,
    /// [`Event::PauseRequested`].
    OperatorPaused,
    /// The wait in this state was over its limit.
    TimedOut(State),
}

/// How the migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The destination has the guest.
    Completed,
    /// Cancelled before the commit.
    Cancelled,
    /// Failed.
    Failed(Cause),
}

/// What became of the source's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestAfter {
    /// As it was before the migration: running if it ran, else paused.
    AsBefore,
    /// The destination has it; here it stays stopped for good.
    Given,
    /// Held stopped, because this failed; `cont` tries again.
    HeldStopped(Hold),
}

/// What keeps a guest held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hold {
    /// A hook could not be re-acquired.
    Hooks,
    /// The guest could not be resumed.
    Resume,
}

/// The end of a migration at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// What became of the guest.
    pub guest: GuestAfter,
    /// Dirty tracking could not be stopped.
    pub tracking_left_on: bool,
}

/// Why an event was refused; the machine did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Cancel after the commit.
    #[error(
        "cannot cancel: the guest has been handed over ({state:?}) and may already run at the destination; \
         wait for the outcome, or stop the guest there and migrate it back"
    )]
    CancelAfterCommit {
        /// Where the source stands.
        state: State,
    },
    /// Cancel while the guest waits at the destination for pages that are here, or is whole there and nobody says so.
    #[error(
        "cannot cancel: the guest has run at the destination since, and what is here is its past ({}). Look at the \
         destination: where 'query-migrate' says postcopy-paused, pages are missing there, so say migrate with resume here; \
         where it says completed, or where the guest is lost, decide destination-runs here",
        state.qemu_status()
    )]
    CancelPaused {
        /// Where the source stands.
        state: State,
    },
    /// Cancel while undecided.
    #[error(
        "cannot cancel: nobody knows whether the destination runs the guest; find out there, \
         then decide: source-runs (only if the destination's guest is gone for good) or destination-runs"
    )]
    CancelUndecided,
    /// Cancel while the guest is protected.
    #[error(
        "cannot cancel: the guest is protected by a standby that may have to run it; end the protection instead, which \
         asks the standby for its last word"
    )]
    CancelProtected,
    /// Cancel when the migration is over.
    #[error("nothing to cancel: the migration is over ({state:?}); start another one if it is wanted")]
    NothingToCancel {
        /// Where the source stands.
        state: State,
    },
    /// `migrate-continue` at a wrong time.
    #[error(
        "migrate-continue works only in pre-switchover, the state is {}; wait for it, with pause-before-switchover on",
        state.qemu_status()
    )]
    NotPreSwitchover {
        /// Where the source stands.
        state: State,
    },
    /// Postcopy without the capability.
    #[error(
        "postcopy cannot be started: capability postcopy-ram was not on when the migration began, or the return path is off"
    )]
    NoPostcopy,
    /// Postcopy at a wrong time.
    #[error(
        "postcopy can only be started while memory moves and the guest runs here, the state is {}",
        state.qemu_status()
    )]
    NotActive {
        /// Where the source stands.
        state: State,
    },
    /// A decision that the source runs a guest which has run elsewhere.
    #[error(
        "the source cannot run the guest any more: it has run at the destination since, and what is here is its past. \
         Decide destination-runs to give its memory up here, once the guest is complete there or lost"
    )]
    RanElsewhere,
    /// A recovery when there is nothing to recover.
    #[error(
        "migrate with resume works only in postcopy-paused, the state is {}; leave resume out to start a new migration",
        state.qemu_status()
    )]
    NotPostcopyPaused {
        /// Where the source stands.
        state: State,
    },
    /// A pause when there is nothing to pause.
    #[error(
        "migrate-pause works only in postcopy-active and postcopy-recover, the state is {}",
        state.qemu_status()
    )]
    NotPostcopyActive {
        /// Where the source stands.
        state: State,
    },
    /// A decision when there is nothing to decide.
    #[error(
        "nothing to decide: only an undecided migration takes an operator's decision, the state is {state:?}"
    )]
    NotUndecided {
        /// Where the source stands.
        state: State,
    },
    /// A retry when the guest is not held.
    #[error(
        "the guest is not held after a failed undoing, there is nothing to retry; the state is {state:?}"
    )]
    NotHeld {
        /// Where the source stands.
        state: State,
    },
    /// Acknowledgements are missing: go on with precopy.
    #[error("the destination has acknowledged {arrived} of {due} times: continue precopy until it is ready")]
    AcknowledgementsMissing {
        /// How many came.
        arrived: u32,
        /// How many must come.
        due: u32,
    },
    /// The event cannot happen in this state: the engine's fault.
    #[error("{event:?} cannot happen in state {state:?}: the engine fed the machine out of order")]
    OutOfOrder {
        /// Where the source stands.
        state: State,
        /// What it was told.
        event: Event,
    },
}
