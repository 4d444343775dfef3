//! Bugs that the simulator must find, each planted between a machine and its
//! process.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The standby says that it holds a checkpoint of which a part is missing.
    HeldBeforeWhole,
    /// The gate lets go when a checkpoint was sent, not when it is held.
    ReleaseOnSent,
    /// The lease counts from when an echo came, not from when its heartbeat
    /// was sent.
    LeaseFromReceipt,
    /// The standby starts without a claim.
    StandbyDoesNotAsk,
    /// The primary goes on alone without a claim.
    PrimaryDoesNotAsk,
    /// The gate does not look at the lease when a piece leaves.
    GateDoesNotLook,
    /// The standby's memory takes parts of a checkpoint as they come.
    AppliedBeforeWhole,
    /// An acknowledgement of the generation before counts.
    OldGenerationCounts,
    /// A heartbeat's echo of another session counts.
    OtherSessionCounts,
    /// The standby believes that it has fenced.
    NoFence,
    /// The guest runs on before its pages are protected or copied.
    ResumedBeforeProtected,
    /// The standby echoes heartbeats while it claims.
    AnswersWhileClaiming,
    /// The primary's guest runs on when the lease is over.
    RunsOnWithoutLease,
    /// A planned takeover begins without a look at whether the arbiter is in
    /// reach.
    HandsOverUnasked,
}

impl Planted {
    /// Every bug.
    pub const ALL: [Self; 14] = [
        Self::HeldBeforeWhole,
        Self::ReleaseOnSent,
        Self::LeaseFromReceipt,
        Self::StandbyDoesNotAsk,
        Self::PrimaryDoesNotAsk,
        Self::GateDoesNotLook,
        Self::AppliedBeforeWhole,
        Self::OldGenerationCounts,
        Self::OtherSessionCounts,
        Self::NoFence,
        Self::ResumedBeforeProtected,
        Self::AnswersWhileClaiming,
        Self::RunsOnWithoutLease,
        Self::HandsOverUnasked,
    ];
}
