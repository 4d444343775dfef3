//! States, events, actions, outcome and refusals of the standby.

use crate::replica::{Answer, Protection, Ruling, Terms};

/// The standby's settings, fixed before the protection starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The identity of this protection.
    pub protection: Protection,
    /// Time limits on which both sides agreed.
    pub terms: Terms,
    /// The primary cannot stop its guest by itself (an unmodified QEMU). The guest is started here
    /// only after a fence has succeeded.
    pub needs_fence: bool,
}

/// The standby's states, from the seeding to the end of the protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// RAM arrives for the first time; no checkpoint is complete.
    Seeding,
    /// At least one checkpoint is complete.
    Following,
    /// The last checkpoint is being prepared for the start: applied, devices loaded. The primary
    /// may still claim the guest.
    Preparing,
    /// The preparation failed. Nothing was claimed; waits for the operator.
    Unready,
    /// The arbiter is being asked.
    Claiming,
    /// The claim is won; the fence command runs.
    Fencing,
    /// The claim is won, and the fence has failed. Waits for the operator.
    Unfenced,
    /// The guest is being started.
    Starting,
    /// This side has the guest but could not start it. Waits for the operator.
    Held,
    /// The guest runs here. Final.
    Running,
    /// Everything was discarded: this side never runs the guest. Final.
    Discarded,
}

impl State {
    /// Every state, in the order of the type.
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

    /// Whether the protection is over: no event changes this state any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Discarded)
    }
}

/// Input of the standby's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// This checkpoint has arrived complete and was checked. The first is 1.
    CheckpointHeld(u64),
    /// A heartbeat with this number was read.
    Heartbeat(Protection, u64),
    /// The primary requests the end of the protection.
    UnprotectRead(Protection),
    /// The primary has stopped the guest for this side.
    GiveRead(Protection),
    /// The primary's guest has ended with its process.
    GoneRead(Protection),
    /// A channel ended or failed.
    ConnectionLost,
    /// The peer broke a rule of the protocol or of its formats. Complete checkpoints stay usable.
    PeerMisbehaved,
    /// A local part failed, and no further checkpoint can be stored.
    LocalFailure,
    /// [`Action::Prepare`] succeeded: the checkpoint can be started.
    Prepared {
        /// Whether the arbiter can be asked now. If not, and the primary has given its guest, the
        /// takeover is dropped, because nothing was claimed yet.
        is_arbiter_in_reach: bool,
    },
    /// [`Action::Prepare`] failed: the checkpoint cannot be started.
    PrepareFailed,
    /// [`Action::Claim`] succeeded with this ruling.
    Ruled(Ruling),
    /// [`Action::Claim`] ended without a ruling; the arbiter may have ruled.
    ArbiterOutOfReach,
    /// [`Action::Fence`] succeeded: the primary's guest does not run.
    Fenced,
    /// [`Action::Fence`] failed: the primary's guest may still run.
    FenceFailed,
    /// [`Action::Start`] succeeded: the guest runs.
    Started,
    /// [`Action::Start`] failed: the guest does not run.
    StartFailed,
    /// The operator requests a takeover.
    TakeOver {
        /// The primary first takes a last checkpoint. If false, contact is given up, and the claim
        /// decides.
        is_planned: bool,
        /// Whether this side can ask the arbiter now.
        is_arbiter_in_reach: bool,
    },
    /// The operator retries the failed step in [`State::Unready`], [`State::Unfenced`] or
    /// [`State::Held`].
    Retry,
    /// The operator vouches in [`State::Unfenced`] that the primary's guest
    /// does not run and never will.
    Vouch,
    /// The time has advanced; due at [`super::Standby::deadline`].
    Tick,
}

/// Output of the standby's machine: the engine performs these in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Report to the primary the last checkpoint and the last heartbeat.
    SendAnswer(Answer),
    /// Declare to the primary that this side never runs the guest.
    SendNever,
    /// Report to the primary that the guest runs here, if contact still exists.
    SendRuns,
    /// Ask the primary for a planned takeover.
    SendHandOver,
    /// Shut every channel down.
    CloseChannels,
    /// Prepare this checkpoint for the start. Ends in [`Event::Prepared`] or
    /// [`Event::PrepareFailed`].
    Prepare(u64),
    /// Ask the arbiter. Ends in [`Event::Ruled`] or [`Event::ArbiterOutOfReach`].
    Claim,
    /// Run the fence, so that the primary's guest does not run. Ends in [`Event::Fenced`] or
    /// [`Event::FenceFailed`].
    Fence,
    /// Acquire the hooks and start the guest. Ends in [`Event::Started`] or
    /// [`Event::StartFailed`].
    Start,
    /// Discard every checkpoint and the received memory.
    Discard,
    /// The protection is over.
    Finish(Outcome),
}

/// The result of the protection at the standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The guest runs here from this checkpoint.
    Running(u64),
    /// This side never runs the guest, for this reason.
    Discarded(Because),
}

/// The reason why everything was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Because {
    /// The seeding ended before the first checkpoint was complete.
    NothingHeld,
    /// The primary asked for the end of the protection.
    Unprotected,
    /// A local part failed while the primary was in contact.
    LocalFailure,
    /// The arbiter gave the claim to the primary.
    ClaimLost,
    /// The primary had given its guest, and the arbiter could not be asked.
    ArbiterOutOfReach,
}

/// Why the machine refused an event. A refusal does not change the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A checkpoint with a number that was not due.
    #[error(
        "checkpoint {held} arrived instead of {expected}: the engine must end the connection with an error"
    )]
    CheckpointOutOfOrder {
        /// The number of the checkpoint.
        held: u64,
        /// The number that was due.
        expected: u64,
    },
    /// A takeover before the first checkpoint.
    #[error(
        "nothing to take over: the first checkpoint has not arrived yet. Wait for it, or start the guest from its \
         disks"
    )]
    NothingHeld,
    /// A planned takeover without contact with the primary.
    #[error(
        "a planned takeover needs contact to the primary, and there is none; take over without `--planned`"
    )]
    NoContact,
    /// A planned takeover without an arbiter, although it ends in a claim.
    #[error(
        "the arbiter cannot be reached, but a planned takeover needs its claim: nothing was claimed, and the guest \
         continues to run at the primary, protected. Make sure that this side can reach its arbiter, then repeat the \
         takeover"
    )]
    ArbiterOutOfReach,
    /// A takeover that is under way or over already.
    #[error("a takeover is running or has ended; the state is {state:?}")]
    TakeoverUnderWay {
        /// The state of the standby.
        state: State,
    },
    /// A retry or a vouch in a state that waits for no operator.
    #[error("no step waits for an operator's confirmation; the state is {state:?}")]
    NothingWaits {
        /// The state of the standby.
        state: State,
    },
    /// The event is impossible in this state, which is a fault of the engine.
    #[error(
        "{event:?} cannot happen in state {state:?}: the engine passed events to the state machine in the wrong \
             order"
    )]
    OutOfOrder {
        /// The state of the standby.
        state: State,
        /// The event that was fed.
        event: Event,
    },
}
