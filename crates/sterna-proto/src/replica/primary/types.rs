//! States, events, actions, outcome and refusals of the primary.

use crate::replica::{Answer, Protection, Ruling, Terms};

/// The primary's settings, fixed before the protection starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The identity of this protection.
    pub protection: Protection,
    /// Time limits on which both sides agreed.
    pub terms: Terms,
    /// How many checkpoints may be unanswered at the same time, at least 1.
    pub in_flight: u64,
}

/// The primary's states, from the seeding to the end of the protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// RAM is sent for the first time. The standby has no checkpoint, and the guest's output is
    /// released immediately.
    Seeding,
    /// Checkpoints are taken. The guest's output waits until the standby has stored them.
    Protected,
    /// An operator has requested the end of the protection. The standby was asked for its last
    /// answer.
    Ending,
    /// A planned takeover: the last checkpoint is being taken and sent.
    HandingOver,
    /// The standby was informed that the guest is stopped for it.
    Given,
    /// Contact is lost and is never restored: only the arbiter decides.
    Asking,
    /// The guest runs here, unprotected. Final.
    Alone,
    /// The standby has taken the guest over as planned. Final.
    HandedOver,
    /// The standby has the guest; it was destroyed here. Final.
    Lost,
    /// The seeding failed; the guest continues as before. Final.
    Failed,
}

impl State {
    /// Every state, in the order of the type.
    pub const ALL: [Self; 10] = [
        Self::Seeding,
        Self::Protected,
        Self::Ending,
        Self::HandingOver,
        Self::Given,
        Self::Asking,
        Self::Alone,
        Self::HandedOver,
        Self::Lost,
        Self::Failed,
    ];

    /// Whether the protection is over: no event changes this state any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Alone | Self::HandedOver | Self::Lost | Self::Failed)
    }

    /// Whether standby and primary are in contact, so that the lease counts.
    #[must_use]
    pub fn is_in_contact(self) -> bool {
        matches!(self, Self::Protected | Self::Ending | Self::HandingOver | Self::Given)
    }
}

/// Input of the primary's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A checkpoint was taken; the first is 1.
    ///
    /// Its pages are protected or copied, later output of the guest belongs to the next epoch, and
    /// the guest may resume. The engine feeds this event *before* it hands the checkpoint's end to
    /// the transport.
    CheckpointTaken(u64),
    /// [`Action::TakeLastCheckpoint`] succeeded: the guest is stopped, and this is the last
    /// checkpoint.
    ///
    /// Fed as early as [`Event::CheckpointTaken`].
    LastCheckpointTaken(u64),
    /// The standby has reported its last checkpoint and the last heartbeat.
    Answered(Answer),
    /// The standby has declared that it discards its checkpoints and never runs the guest.
    Never(Protection),
    /// The standby has reported that it runs the guest.
    StandbyRuns(Protection),
    /// The standby's operator requests a planned takeover.
    HandOverRequested(Protection),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the protocol or of its formats.
    PeerMisbehaved,
    /// A local part failed (dirty tracking, a device's save, a thread).
    LocalFailure,
    /// The guest has ended with its process, without an operator's request. It never runs here
    /// again.
    GuestGone,
    /// [`Action::Claim`] succeeded with this ruling.
    Ruled(Ruling),
    /// [`Action::Claim`] ended without a ruling; the arbiter may have ruled.
    ArbiterOutOfReach,
    /// The operator requests the end of the protection, with the guest here.
    Unprotect,
    /// The operator requests a planned takeover.
    ///
    /// Before that, while the guest runs, the engine checks whether this side can ask the arbiter
    /// now.
    HandOver {
        /// The arbiter can be asked.
        is_arbiter_in_reach: bool,
    },
    /// The time has advanced; due at [`super::Primary::deadline`].
    Tick,
}

/// Output of the primary's machine: the engine performs these in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a heartbeat with this number.
    SendHeartbeat(u64),
    /// Release the guest's output up to the end of this epoch.
    ///
    /// The gate calls [`super::Primary::may_say`] again for every piece. This action ends before
    /// the next action begins.
    Release(u64),
    /// Stop the guest, take a checkpoint, send it. Ends in
    /// [`Event::LastCheckpointTaken`].
    TakeLastCheckpoint,
    /// Inform the standby that the guest is stopped for it.
    SendGive,
    /// Inform the standby that the guest has ended.
    SendGone,
    /// Ask the standby for its last answer.
    SendUnprotect,
    /// Stop the guest immediately. If that is impossible, end this process.
    StopGuest,
    /// Shut every channel down.
    CloseChannels,
    /// Ask the arbiter. Ends in [`Event::Ruled`] or [`Event::ArbiterOutOfReach`].
    Claim,
    /// Release all output that waits, and delay no output from now on.
    OpenGate,
    /// Let the guest run again.
    ResumeGuest,
    /// Discard the guest's output that was not released.
    DropOutput,
    /// Destroy the guest: the standby has it.
    DestroyGuest,
    /// The protection is over.
    Finish(Outcome),
}

/// The result of the protection at the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here, for this reason.
    Alone(Because),
    /// The standby has taken the guest over as planned.
    HandedOver,
    /// The standby has the guest.
    Lost,
    /// The seeding failed, and the guest continues as before.
    Failed(Cause),
}

/// Why the primary's guest may run unprotected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Because {
    /// The standby declared that it never runs the guest.
    Never,
    /// The arbiter gave the claim to this side.
    Claim,
}

/// The reason why contact ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A channel ended or failed: [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an answer that was not due.
    PeerMisbehaved,
    /// A local part failed: [`Event::LocalFailure`].
    LocalFailure,
    /// The standby has not echoed a heartbeat for as long as the lease.
    LeaseOver,
    /// An operator ended the protection in the seeding: [`Event::Unprotect`].
    Cancelled,
}

/// Why the machine refused an event. A refusal does not change the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A checkpoint with a number that was not due.
    #[error("checkpoint {taken} was taken instead of {expected}: the engine's count is wrong")]
    CheckpointOutOfOrder {
        /// The number of the checkpoint.
        taken: u64,
        /// The number that was due.
        expected: u64,
    },
    /// Another checkpoint, while [`Config::in_flight`] are unanswered.
    #[error("{in_flight} checkpoints are not acknowledged yet: wait for the standby before the next one")]
    TooManyInFlight {
        /// Number of unanswered checkpoints.
        in_flight: u64,
    },
    /// A planned takeover of a guest that is not protected or has no contact.
    #[error(
        "a planned takeover needs a guest that is protected and in contact with its standby; the state is {state:?}. \
         Wait until the first checkpoint is held"
    )]
    CannotHandOver {
        /// The state of the primary.
        state: State,
    },
    /// A planned takeover without an arbiter, although it ends in a claim.
    #[error(
        "the arbiter cannot be reached, but a planned takeover needs its claim: nothing was claimed, and the guest \
         continues to run, protected. Make sure that this side can reach its arbiter, then repeat the takeover"
    )]
    ArbiterOutOfReach,
    /// The end of a protection that is over, or whose guest the standby may have.
    #[error(
        "the protection cannot be ended in state {state:?}: it has ended, or the standby may already have the guest"
    )]
    CannotUnprotect {
        /// The state of the primary.
        state: State,
    },
    /// The event is impossible in this state, which is a fault of the engine.
    #[error(
        "{event:?} cannot happen in state {state:?}: the engine passed events to the state machine in the wrong \
             order"
    )]
    OutOfOrder {
        /// The state of the primary.
        state: State,
        /// The event that was fed.
        event: Event,
    },
}
