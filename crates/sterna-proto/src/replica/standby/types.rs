//! States, events, actions, outcome and refusals of the standby.

use crate::replica::{Answer, Protection, Ruling, Terms};

/// What the standby must know before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Names this protection.
    pub protection: Protection,
    /// What both sides agreed on.
    pub terms: Terms,
    /// The primary cannot stop its guest by itself (an unmodified QEMU): the
    /// guest is started here only after a fence has worked.
    pub needs_fence: bool,
}

/// Where the standby stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// RAM comes for the first time; no checkpoint is held.
    Seeding,
    /// At least one checkpoint is held.
    Following,
    /// The last checkpoint is being made ready to start: applied, devices
    /// loaded. The guest may still be claimed by the primary.
    Preparing,
    /// Making ready failed. Nothing was claimed; waits for the operator.
    Unready,
    /// The arbiter is being asked.
    Claiming,
    /// The claim is won; the fence is at work.
    Fencing,
    /// The claim is won, and the fence has failed. Waits for the operator.
    Unfenced,
    /// The guest is being started.
    Starting,
    /// The guest is ours and could not be started. Waits for the operator.
    Held,
    /// The guest runs here.
    Running,
    /// Everything was discarded: this side never runs the guest.
    Discarded,
}

impl State {
    /// Every state, in order.
    pub const ALL: [Self; 11] = [
        Self::Seeding,
        Self::Following,
        Self::Preparing,
        Self::Unready,
        Self::Claiming,
        Self::Fencing,
        Self::Unfenced,
        Self::Starting,
        Self::Held,
        Self::Running,
        Self::Discarded,
    ];

    /// Whether the protection is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Discarded)
    }
}

/// What the standby is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// This checkpoint has come whole and was checked. The first is 1.
    CheckpointHeld(u64),
    /// A heartbeat was read.
    Heartbeat(Protection, u64),
    /// The primary wants the protection to end.
    UnprotectRead(Protection),
    /// The primary has stopped the guest for this side.
    GiveRead(Protection),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the format. What is held stays good.
    PeerMisbehaved,
    /// Something of ours failed, and no further checkpoint can be held.
    LocalFailure,
    /// [`Action::Prepare`] ended.
    Prepared {
        /// Whether the arbiter can be asked, now. It matters if the primary
        /// has given its guest: nothing was claimed yet.
        is_arbiter_in_reach: bool,
    },
    /// [`Action::Prepare`] failed.
    PrepareFailed,
    /// [`Action::Claim`] ended.
    Ruled(Ruling),
    /// [`Action::Claim`] brought no ruling; the arbiter may have ruled.
    ArbiterOutOfReach,
    /// [`Action::Fence`] ended: the primary's guest does not run.
    Fenced,
    /// [`Action::Fence`] failed.
    FenceFailed,
    /// [`Action::Start`] ended: the guest runs.
    Started,
    /// [`Action::Start`] failed: the guest does not run.
    StartFailed,
    /// The operator wants a takeover.
    TakeOver {
        /// The primary makes a last checkpoint first. Otherwise contact is
        /// given up, and the claim decides.
        is_planned: bool,
        /// Whether this side can ask the arbiter, now.
        is_arbiter_in_reach: bool,
    },
    /// The operator wants the failed step again, in [`State::Unready`],
    /// [`State::Unfenced`] and [`State::Held`].
    Retry,
    /// The operator vouches in [`State::Unfenced`] that the primary's guest
    /// does not run and never will.
    Vouch,
    /// Time has passed; due at [`super::Standby::deadline`].
    Tick,
}

/// What the engine shall do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the primary what is held and what was heard.
    SendAnswer(Answer),
    /// Tell the primary that this side never runs the guest.
    SendNever,
    /// Tell the primary that the guest runs here, if it can still be told.
    SendRuns,
    /// Ask the primary for a planned takeover.
    SendHandOver,
    /// Shut every channel down.
    CloseChannels,
    /// Make this checkpoint ready to start. Ends in [`Event::Prepared`] or
    /// [`Event::PrepareFailed`].
    Prepare(u64),
    /// Ask the arbiter. Ends in [`Event::Ruled`] or
    /// [`Event::ArbiterOutOfReach`].
    Claim,
    /// See to it that the primary's guest does not run. Ends in
    /// [`Event::Fenced`] or [`Event::FenceFailed`].
    Fence,
    /// Acquire the hooks and start the guest. Ends in [`Event::Started`] or
    /// [`Event::StartFailed`].
    Start,
    /// Forget everything that is held.
    Discard,
    /// The protection is over.
    Finish(Outcome),
}

/// How the protection ended at the standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here from this checkpoint.
    Running(u64),
    /// This side never runs the guest, because of this.
    Discarded(Because),
}

/// Why everything was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Because {
    /// No first checkpoint has come.
    NothingHeld,
    /// The primary asked for the end of the protection.
    Unprotected,
    /// Something of ours failed while the primary was in contact.
    LocalFailure,
    /// The arbiter gave the claim to the primary.
    ClaimLost,
    /// The primary had given its guest, and the arbiter could not be asked.
    ArbiterOutOfReach,
}

/// Why an event was refused; the machine did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A checkpoint out of order.
    #[error(
        "checkpoint {held} came where {expected} was due: the engine must end the connection with an error"
    )]
    CheckpointOutOfOrder {
        /// Its number.
        held: u64,
        /// The number that was due.
        expected: u64,
    },
    /// There is nothing to take over.
    #[error(
        "there is nothing to take over: the first checkpoint has not come yet. Wait for it, or start the guest anew"
    )]
    NothingHeld,
    /// A planned takeover needs the primary.
    #[error(
        "a planned takeover needs the primary, and there is no contact with it; take over without `--planned`"
    )]
    NoContact,
    /// A planned takeover ends in a claim.
    #[error(
        "the arbiter cannot be asked now, and a planned takeover ends in a claim: nothing was claimed, and the guest goes \
         on at the primary, protected. See that this side reaches its arbiter, then take over again"
    )]
    ArbiterOutOfReach,
    /// A takeover is under way or over.
    #[error("a takeover is under way or over already; the state is {state:?}")]
    TakeoverUnderWay {
        /// Where the standby stands.
        state: State,
    },
    /// Nothing waits for an operator.
    #[error("nothing waits for an operator's word; the state is {state:?}")]
    NothingWaits {
        /// Where the standby stands.
        state: State,
    },
    /// The event cannot happen in this state: the engine's fault.
    #[error("{event:?} cannot happen in state {state:?}: the engine fed the machine out of order")]
    OutOfOrder {
        /// Where the standby stands.
        state: State,
        /// What it was told.
        event: Event,
    },
}
