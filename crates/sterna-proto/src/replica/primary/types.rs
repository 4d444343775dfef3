//! States, events, actions, outcome and refusals of the primary.

use crate::replica::{Answer, Protection, Ruling, Terms};

/// What the primary must know before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Names this protection.
    pub protection: Protection,
    /// What both sides agreed on.
    pub terms: Terms,
    /// How many checkpoints may be unacknowledged at once, at least 1.
    pub in_flight: u64,
}

/// Where the primary stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// RAM moves for the first time. The standby holds nothing, and nothing of
    /// what the guest says is held back.
    Seeding,
    /// Checkpoints are taken. What the guest says waits for them.
    Protected,
    /// An operator wants the protection to end: the standby was asked for its
    /// last word.
    Ending,
    /// A planned takeover: the last checkpoint is taken and sent.
    HandingOver,
    /// The standby was told that the guest is stopped for it.
    Given,
    /// Contact is over for good: only the arbiter decides.
    Asking,
    /// The guest runs here, unprotected.
    Alone,
    /// The standby has taken the guest over as planned.
    HandedOver,
    /// The standby has the guest; it was destroyed here.
    Lost,
    /// The seeding failed; the guest runs on as before.
    Failed,
}

impl State {
    /// Every state, in order.
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

    /// Whether the protection is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Alone | Self::HandedOver | Self::Lost | Self::Failed)
    }

    /// Whether standby and primary are in contact, and the lease counts.
    #[must_use]
    pub fn is_in_contact(self) -> bool {
        matches!(self, Self::Protected | Self::Ending | Self::HandingOver | Self::Given)
    }
}

/// What the primary is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A checkpoint was taken: its pages are protected or copied, what the
    /// guest says from now on belongs to the next epoch, and the guest may go
    /// on. Said *before* the checkpoint's end is handed to the transport. The
    /// first is 1.
    CheckpointTaken(u64),
    /// [`Action::TakeLastCheckpoint`] ended: the guest is stopped, and this
    /// is the last checkpoint. Said as early as [`Event::CheckpointTaken`].
    LastCheckpointTaken(u64),
    /// The standby has said what it holds and has heard.
    Answered(Answer),
    /// The standby has said that it discards what it holds and never runs the
    /// guest.
    Never(Protection),
    /// The standby has said that it runs the guest.
    StandbyRuns(Protection),
    /// The standby's operator wants a planned takeover.
    HandOverRequested(Protection),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the format.
    PeerMisbehaved,
    /// Something of ours failed (dirty tracking, a device's save, a thread).
    LocalFailure,
    /// [`Action::Claim`] ended.
    Ruled(Ruling),
    /// [`Action::Claim`] brought no ruling; the arbiter may have ruled.
    ArbiterOutOfReach,
    /// The operator wants the protection to end, with the guest here.
    Unprotect,
    /// The operator wants a planned takeover. Asked first, while the guest
    /// runs: whether this side can ask the arbiter, now.
    HandOver {
        /// It can be asked.
        is_arbiter_in_reach: bool,
    },
    /// Time has passed; due at [`super::Primary::deadline`].
    Tick,
}

/// What the engine shall do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a heartbeat with this number.
    SendHeartbeat(u64),
    /// Let go what the guest said up to the end of this epoch; the gate asks
    /// [`super::Primary::may_say`] again for every piece. Ends before the next
    /// action begins.
    Release(u64),
    /// Stop the guest, take a checkpoint, send it. Ends in
    /// [`Event::LastCheckpointTaken`].
    TakeLastCheckpoint,
    /// Tell the standby that the guest is stopped for it.
    SendGive,
    /// Ask the standby for its last word.
    SendUnprotect,
    /// Stop the guest at once. If that is impossible, end this process.
    StopGuest,
    /// Shut every channel down.
    CloseChannels,
    /// Ask the arbiter. Ends in [`Event::Ruled`] or
    /// [`Event::ArbiterOutOfReach`].
    Claim,
    /// Let go everything that waits, and hold nothing back from now on.
    OpenGate,
    /// Let the guest run again.
    ResumeGuest,
    /// Forget what the guest said and was not let go.
    DropOutput,
    /// Destroy the guest: the standby has it.
    DestroyGuest,
    /// The protection is over.
    Finish(Outcome),
}

/// How the protection ended at the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here, because of this.
    Alone(Because),
    /// The standby has taken the guest over as planned.
    HandedOver,
    /// The standby has the guest.
    Lost,
    /// The seeding failed, and the guest runs on as before.
    Failed(Cause),
}

/// Why the primary's guest may run unprotected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Because {
    /// The standby said that it never runs the guest.
    Never,
    /// The arbiter gave the claim to this side.
    Claim,
}

/// What ended the contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// [`Event::ConnectionLost`].
    ConnectionLost,
    /// [`Event::PeerMisbehaved`], or an answer that was not due.
    PeerMisbehaved,
    /// [`Event::LocalFailure`].
    LocalFailure,
    /// The standby has not answered for as long as the lease.
    LeaseOver,
    /// [`Event::Unprotect`] in the seeding.
    Cancelled,
}

/// Why an event was refused; the machine did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A checkpoint out of order.
    #[error("checkpoint {taken} was taken where {expected} was due: the engine counted wrong")]
    CheckpointOutOfOrder {
        /// Its number.
        taken: u64,
        /// The number that was due.
        expected: u64,
    },
    /// Too many checkpoints are unacknowledged.
    #[error("{in_flight} checkpoints are not acknowledged yet: wait for the standby before the next one")]
    TooManyInFlight {
        /// How many.
        in_flight: u64,
    },
    /// A planned takeover needs a protected guest.
    #[error(
        "a planned takeover needs a guest that is protected and in contact with its standby; the state is {state:?}. \
         Wait until the first checkpoint is held"
    )]
    CannotHandOver {
        /// Where the primary stands.
        state: State,
    },
    /// A planned takeover ends in a claim.
    #[error(
        "the arbiter cannot be asked now, and a planned takeover ends in a claim: nothing was claimed, and the guest goes \
         on, protected. See that this side reaches its arbiter, then hand over again"
    )]
    ArbiterOutOfReach,
    /// The protection is over or about to end.
    #[error(
        "the protection cannot be ended in state {state:?}: it is over, or the standby may have the guest already"
    )]
    CannotUnprotect {
        /// Where the primary stands.
        state: State,
    },
    /// The event cannot happen in this state: the engine's fault.
    #[error("{event:?} cannot happen in state {state:?}: the engine fed the machine out of order")]
    OutOfOrder {
        /// Where the primary stands.
        state: State,
        /// What it was told.
        event: Event,
    },
}
