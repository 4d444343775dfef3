//! States, events, actions, outcome and refusals of the source.

use crate::{Limits, Status};

/// How many acknowledgements must arrive before the switchover (spec §5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SwitchoverAck {
    /// Capability off: any acknowledgement is an error.
    #[default]
    Off,
    /// Machine types up to 11.0: exactly one is due.
    Legacy,
    /// From 11.1: one for each [`Event::DeviceAsksAck`].
    Modern,
}

/// The source's settings, fixed before the migration starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// The peer can answer on the main channel. Without a return path there is neither prepare nor
    /// acknowledgement: see the crate's documentation.
    pub return_path: bool,
    /// The VM has a compatibility record for a Sterna peer to accept.
    pub compatibility: bool,
    /// Capability `pause-before-switchover`: the source waits in [`State::PreSwitchover`].
    pub pause_before_switchover: bool,
    /// Capability `switchover-ack`, and the machine type's form of it.
    pub switchover_ack: SwitchoverAck,
    /// The destination is a standby, and the migration is the seeding of a protection.
    ///
    /// The guest stays here. There is neither prepare nor commit.
    pub protects: bool,
    /// Capability `postcopy-ram`: [`Event::PostcopyRequested`] is allowed.
    pub postcopy: bool,
    /// Time limits of this side's waits.
    pub limits: Limits,
}

/// The peer's kind, learned from its answers to the extension pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Peer {
    /// The peer is a Sterna: it knows the handover section and the status question.
    pub sterna: bool,
    /// The peer's feature bits; 0 for a QEMU.
    pub features: u16,
}

/// The source's states. [`State::qemu_status`] returns QEMU's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits until all channels are connected.
    Setup,
    /// Waits for the peer's answers to the extension pings.
    Identifying,
    /// Waits until the peer has made its VM from this side's configuration.
    Configuring,
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
    /// The whole seeding, including its EOF, is being sent; waits for SHUT. This EOF commits
    /// nothing, because a standby runs no guest from a seeding alone.
    Seeding,
    /// The standby has the seeding, and the guest runs here. The machines of [`crate::replica`]
    /// decide which side runs it. This machine leaves the state at [`Event::ProtectionEnded`].
    Protected,
    /// The PREPARE ping was sent; waits for its PONG.
    Preparing,
    /// The connection was lost, and the source will reconnect. The switchover's effects are being
    /// undone, and the guest resumes.
    Suspending,
    /// The guest runs here, its writes are tracked, and the source reconnects.
    Reconnecting,
    /// Committed: EOF, or RUN in postcopy, is being handed to the transport.
    Committing,
    /// EOF was sent; waits for SHUT. In postcopy, RUN was sent; waits for the report that the guest
    /// was started.
    AwaitingAck,
    /// The destination runs the guest, or has it paused, and the source sends its pages.
    Postcopy,
    /// As [`State::Postcopy`], but the connection broke. The source keeps the guest's memory.
    PostcopyPaused,
    /// As [`State::Postcopy`], and the source reconnects. It asks which pages the destination has,
    /// and requests that the destination continue.
    PostcopyRecover,
    /// Committed, and the source cannot tell whether the destination runs the guest. It asks again.
    /// The guest stays stopped.
    Undecided,
    /// Undoing after a cancel.
    Cancelling,
    /// Undoing after a failure.
    Failing,
    /// Cancelled or failed, and the undoing failed as well. The guest stays stopped until
    /// [`Event::OperatorRetry`].
    Held,
    /// The destination has the guest. Final.
    Completed,
    /// The cancelled migration is undone; the guest is as before.
    Cancelled,
    /// The failed migration is undone; the guest is as before.
    Failed,
}

impl State {
    /// Every state, in the order of the type.
    pub const ALL: [Self; 26] = [
        Self::Setup,
        Self::Identifying,
        Self::Configuring,
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
            Self::Setup | Self::Identifying | Self::Configuring | Self::Comparing => "setup",
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

    /// Whether the commit has happened, so that a cancel is refused.
    ///
    /// False for `Failing`, although a failure after the commit leads there too: the guest returns.
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

    /// Whether only a migration to a standby enters this state.
    #[must_use]
    pub fn is_of_protection(self) -> bool {
        matches!(self, Self::Seeding | Self::Protected)
    }

    /// Whether the migration is over: no event changes this state any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Cancelled | Self::Failed)
    }
}

/// An operator's decision which side runs the guest of an undecided migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The operator vouches that the destination does not run the guest and never will.
    SourceRuns,
    /// The destination has the guest. In postcopy, only a decision in a pause gives up its pages.
    DestinationRuns,
}

/// Input of the source's machine. The engine keeps exact times and full causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// All channels of the migration are connected.
    ChannelsReady,
    /// [`Action::Identify`] succeeded with this result.
    PeerIdentified(Peer),
    /// [`Action::Identify`] found a peer that makes its VM from a configuration.
    ConfigurationWanted,
    /// [`Action::Configure`] succeeded: the peer has a VM.
    ConfigurationAccepted,
    /// [`Action::Compare`] succeeded: the PONG of the compatibility ping arrived.
    CompatibilityAccepted,
    /// A local device requires that the destination acknowledge the switchover.
    DeviceAsksAck,
    /// SWITCHOVER_ACK was read from the return path.
    SwitchoverAck,
    /// The remaining pages fit the downtime limit: switch over.
    SwitchoverRequested {
        /// The guest runs. A paused guest does not wait for acknowledgements.
        guest_running: bool,
    },
    /// As [`Event::SwitchoverRequested`], but the remaining pages are sent after the switchover:
    /// postcopy. Only with [`Config::postcopy`] and a return path.
    PostcopyRequested {
        /// The guest runs, as in [`Event::SwitchoverRequested`].
        guest_running: bool,
    },
    /// [`Action::StopGuest`] succeeded: the guest is stopped.
    GuestStopped {
        /// The guest ran before, and must run again if the migration fails.
        was_running: bool,
    },
    /// [`Action::StopGuest`] failed, and the VM has undone its partial effects: the guest continues
    /// as before.
    GuestStopFailed,
    /// QMP `migrate-continue` for the state pre-switchover.
    OperatorContinue,
    /// [`Action::ReleaseHooks`] succeeded: no hook is acquired any more.
    HooksReleased,
    /// [`Action::ReleaseHooks`] failed; some hooks may have been released.
    HookReleaseFailed,
    /// [`Action::SendFinalState`] succeeded: everything up to the last device was sent.
    FinalStateSent,
    /// The PONG of the PREPARE ping was read.
    PrepareAcknowledged,
    /// [`Action::SendEof`] or [`Action::SendRun`] succeeded: the transport has all bytes.
    EofSent,
    /// [`Action::SendEof`] or [`Action::SendRun`] failed; some bytes may have been sent.
    EofFailed,
    /// In postcopy: the destination reports that it has started the guest, or taken it over paused.
    DestinationStarted,
    /// In postcopy: the engine is about to send the last pages and EOF.
    PagesSent,
    /// [`Action::CloseChannels`] ended: the engine feeds no event of these channels any more.
    ChannelsClosed,
    /// The operator requests the recovery of a paused postcopy (QMP `migrate` with `resume`).
    ResumeRequested,
    /// The operator requests a pause of a postcopy (QMP `migrate-pause`).
    PauseRequested,
    /// In a recovery: the destination has confirmed that it continues.
    ResumeAcknowledged,
    /// SHUT with this value was read.
    Shut(u32),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the protocol or of its formats.
    PeerMisbehaved,
    /// A local part failed (tracking, a device's save, a thread).
    LocalFailure,
    /// The destination has answered [`Action::AskAgain`] with this status.
    AskAnswered(Status),
    /// [`Action::AskAgain`] ended without an answer.
    AskFailed,
    /// Both sides can continue over another connection if this one is lost.
    MayReconnect,
    /// [`Action::Reconnect`] succeeded: the channels of a new session are connected.
    ///
    /// The destination has also reported which pages it has.
    Reconnected,
    /// [`Action::Reconnect`] found no connection; the machine retries.
    ReconnectFailed,
    /// The destination has answered [`Action::Reconnect`]: it does not continue this migration.
    ReconnectRefused,
    /// An operator cancels (QMP `migrate_cancel`).
    Cancel,
    /// The protection's machine has stopped the guest: no operator may run it.
    GuestWithheld {
        /// The guest ran before it was stopped.
        was_running: bool,
    },
    /// The protection's machine no longer withholds the guest: its operator may run it.
    GuestGivenBack,
    /// The protection is over; its own machine has decided the outcome.
    ProtectionEnded {
        /// The guest stays here. If false, the standby has it.
        guest_is_here: bool,
    },
    /// The operator ends an undecided migration with this decision.
    OperatorDecides(Decision),
    /// [`Action::ReacquireHooks`] succeeded: all hooks are acquired again.
    HooksReacquired,
    /// [`Action::ReacquireHooks`] failed: some hooks are not acquired.
    HooksReacquireFailed,
    /// [`Action::ResumeGuest`] succeeded: the guest runs.
    GuestResumed,
    /// [`Action::ResumeGuest`] failed: the guest is stopped.
    GuestResumeFailed,
    /// [`Action::StopTracking`] succeeded: dirty tracking is off.
    TrackingStopped,
    /// [`Action::StopTracking`] failed: dirty tracking may still be on.
    TrackingStopFailed,
    /// QMP `cont` for a guest that is [`State::Held`].
    OperatorRetry,
    /// The time has advanced; due at [`super::Source::deadline`].
    Tick,
}

/// Output of the source's machine: the engine performs these in order.
///
/// An action whose documentation names an event reports its end through that event. The other
/// actions report nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Open the return path, send the extension pings and the fence, wait for
    /// the fence's PONG. Ends in [`Event::PeerIdentified`] or [`Event::ConfigurationWanted`].
    Identify,
    /// Send the VM's configuration and ping; ends in [`Event::ConfigurationAccepted`].
    Configure,
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
    /// Release disks and locks. Ends in [`Event::HooksReleased`] or `HookReleaseFailed`.
    ReleaseHooks,
    /// SWITCHOVER_START, last RAM, devices. Ends in [`Event::FinalStateSent`]
    /// (or `ConnectionLost`, `LocalFailure`).
    SendFinalState,
    /// Send the PREPARE ping. Its PONG is [`Event::PrepareAcknowledged`].
    SendPrepare,
    /// Send EOF and the description. The commit has happened. Ends in
    /// [`Event::EofSent`] or `EofFailed`.
    SendEof,
    /// In postcopy: send the message that lets the destination start the guest. The commit has
    /// happened. Ends in [`Event::EofSent`] or `EofFailed`.
    SendRun,
    /// In postcopy: send all remaining pages. Pages that the destination requests have priority.
    /// Ends in [`Event::PagesSent`], EOF, and then [`Event::Shut`].
    SendPages,
    /// In postcopy: reconnect, learn which pages the destination has, and request that it continue.
    /// Ends in [`Event::ResumeAcknowledged`] (or `ConnectionLost`, `PeerMisbehaved`,
    /// `LocalFailure`).
    Recover,
    /// Report to the operator that the outcome is unknown, and what to do.
    ReportUndecided(Cause),
    /// Report to the operator that the destination has the guest and may lack pages. The source
    /// keeps these pages.
    ReportPaused(Cause),
    /// Take checkpoints of the guest and send them, until the protection ends.
    TakeCheckpoints,
    /// Ask for the migration's status over a new connection, and drop an older question. Ends in
    /// [`Event::AskAnswered`] or `AskFailed`.
    AskAgain,
    /// Shut every channel down. Returns only when every thread of this migration has stopped
    /// sending and reading guest RAM.
    CloseChannels,
    /// Shut every channel down, as [`Action::CloseChannels`] does, but continue the migration over
    /// other channels. Once this is done, the engine may feed no event of the old channels.
    BreakOff,
    /// Try once to reconnect. Ends in [`Event::Reconnected`], `ReconnectFailed` or
    /// `ReconnectRefused`.
    Reconnect,
    /// Resume precopy over the new channels.
    ///
    /// Send the pages that the destination lacks, and the pages that were written since. Ends as
    /// [`Action::StartPrecopy`].
    ResumePrecopy,
    /// Re-acquire the released hooks in reverse order. Ends in [`Event::HooksReacquired`] or
    /// `HooksReacquireFailed`.
    ReacquireHooks,
    /// Resume the guest. Ends in [`Event::GuestResumed`] or `GuestResumeFailed`.
    ResumeGuest,
    /// Stop dirty tracking. Ends in [`Event::TrackingStopped`] or `TrackingStopFailed` (without
    /// effect after `Completed`).
    StopTracking,
    /// The migration is over. Issued once more when a held guest is freed.
    Finish(Outcome),
}

/// Why a migration ended early or became undecided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A channel ended or failed: [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an answer that was not due.
    PeerMisbehaved,
    /// A local part failed: [`Event::LocalFailure`].
    LocalFailure,
    /// The guest could not be stopped: [`Event::GuestStopFailed`].
    GuestStop,
    /// A hook could not be released: [`Event::HookReleaseFailed`].
    HookRelease,
    /// EOF or RUN could not be sent: [`Event::EofFailed`].
    Eof,
    /// The destination sent SHUT with this value, not 0.
    DestinationFailed(u32),
    /// The destination answered that it never runs the guest.
    DestinationNever,
    /// The connection was not replaced in time, or the destination does not continue.
    NotReconnected,
    /// The operator decided that the source runs the guest.
    OperatorDecided,
    /// The operator paused a postcopy: [`Event::PauseRequested`].
    OperatorPaused,
    /// The wait in this state reached its limit.
    TimedOut(State),
}

/// The result of the migration at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The destination has the guest.
    Completed,
    /// An operator cancelled before the commit.
    Cancelled,
    /// The migration failed with this cause.
    Failed(Cause),
}

/// The state in which the migration leaves the source's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestAfter {
    /// As before the migration: running if it ran, otherwise paused.
    AsBefore,
    /// The destination has the guest. Here it stays stopped permanently.
    Given,
    /// The guest is held, because this step failed. `cont` retries the step.
    HeldStopped(Hold),
}

/// The failed step of the undoing that keeps a guest held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hold {
    /// A hook could not be re-acquired.
    Hooks,
    /// The guest could not be resumed.
    Resume,
}

/// The result of a migration at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// Completed, cancelled or failed.
    pub end: End,
    /// Where the guest is now.
    pub guest: GuestAfter,
    /// Dirty tracking could not be stopped.
    pub tracking_left_on: bool,
}

/// Why the machine refused an event. A refusal does not change the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A cancel after the commit.
    #[error(
        "cannot cancel: the guest has been handed over ({state:?}) and may already run at the destination; wait until \
         the migration ends, or stop the guest there and migrate it back"
    )]
    CancelAfterCommit {
        /// The state of the source.
        state: State,
    },
    /// A cancel after the guest has run at the destination, in postcopy.
    ///
    /// The guest waits for pages there, or is complete and the source does not know it.
    #[error(
        "cannot cancel: the guest already runs at the destination, and the copy here is out of date ({}). Check \
         'query-migrate' at the destination. If it shows postcopy-paused, pages are missing there: use migrate with \
         resume here. If it shows completed, or the guest is lost, decide destination-runs here",
        state.qemu_status()
    )]
    CancelPaused {
        /// The state of the source.
        state: State,
    },
    /// A cancel of an undecided migration.
    #[error(
        "cannot cancel: it is unknown whether the destination runs the guest; find out there, then decide: \
         source-runs (only if the guest does not run at the destination and never will) or destination-runs"
    )]
    CancelUndecided,
    /// A cancel while a standby protects the guest.
    #[error(
        "cannot cancel: the guest is protected by a standby that may have to run it; end the protection instead"
    )]
    CancelProtected,
    /// A cancel after the end of the migration.
    #[error("nothing to cancel: the migration has ended ({state:?})")]
    NothingToCancel {
        /// The state of the source.
        state: State,
    },
    /// `migrate-continue` in a state other than pre-switchover.
    #[error(
        "migrate-continue works only in pre-switchover, but the state is {}: switch pause-before-switchover on, and \
         wait for this state",
        state.qemu_status()
    )]
    NotPreSwitchover {
        /// The state of the source.
        state: State,
    },
    /// A request for postcopy without the capability or without a return path.
    #[error(
        "postcopy cannot be started: capability postcopy-ram was not on when the migration began, or the return path is off"
    )]
    NoPostcopy,
    /// A request for postcopy in a state other than active.
    #[error(
        "postcopy can be started only while memory is sent and the guest runs here, but the state is {}",
        state.qemu_status()
    )]
    NotActive {
        /// The state of the source.
        state: State,
    },
    /// The decision that the source runs a guest that has run at the destination.
    #[error(
        "the source cannot run the guest any more: the guest already runs at the destination, and the copy here is \
         out of date. When the guest has all of its memory there, or is lost, decide destination-runs to release the \
         memory here"
    )]
    RanElsewhere,
    /// A request for recovery in a state other than postcopy-paused.
    #[error(
        "migrate with resume works only in postcopy-paused, but the state is {}: leave resume out to start a new \
         migration",
        state.qemu_status()
    )]
    NotPostcopyPaused {
        /// The state of the source.
        state: State,
    },
    /// A request for a pause in a state without a running postcopy.
    #[error(
        "migrate-pause works only in postcopy-active and postcopy-recover, but the state is {}",
        state.qemu_status()
    )]
    NotPostcopyActive {
        /// The state of the source.
        state: State,
    },
    /// An operator's decision about a migration that needs none, or that needed it in another state.
    #[error("the decision has no effect in the state {state:?}: check the status before you decide again")]
    NotUndecided {
        /// The state of the source.
        state: State,
    },
    /// A retry although the guest is not held.
    #[error("nothing to retry: the guest is not held after a failed resume; the state is {state:?}")]
    NotHeld {
        /// The state of the source.
        state: State,
    },
    /// Acknowledgements are missing: the engine continues precopy.
    #[error("the destination has acknowledged {arrived} of {due} times: continue precopy until it is ready")]
    AcknowledgementsMissing {
        /// Acknowledgements that have arrived.
        arrived: u32,
        /// Acknowledgements that are due.
        due: u32,
    },
    /// The event is impossible in this state, which is a fault of the engine.
    #[error(
        "{event:?} cannot happen in state {state:?}: the engine passed events to the state machine in the wrong \
             order"
    )]
    OutOfOrder {
        /// The state of the source.
        state: State,
        /// The event that was fed.
        event: Event,
    },
}
