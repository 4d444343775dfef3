//! Bugs that the simulator must find. Each is planted between a machine and its process.

/// A bug of one of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The standby reports a checkpoint of which a part is missing.
    HeldBeforeWhole,
    /// The gate releases output when a checkpoint was sent, before the standby has stored it.
    ReleaseOnSent,
    /// The lease counts from the arrival of an echo, not from the sending of its heartbeat.
    LeaseFromReceipt,
    /// The standby starts without a claim.
    StandbyDoesNotAsk,
    /// The primary continues alone without a claim.
    PrimaryDoesNotAsk,
    /// The gate does not check the lease when it releases a piece of output.
    GateDoesNotLook,
    /// The standby applies parts of a checkpoint to the memory as they arrive.
    AppliedBeforeWhole,
    /// An answer of the previous generation counts.
    OldGenerationCounts,
    /// A heartbeat's echo of another session counts.
    OtherSessionCounts,
    /// The standby skips the fence and assumes that it succeeded.
    NoFence,
    /// The guest resumes before its pages are protected or copied.
    ResumedBeforeProtected,
    /// The standby echoes heartbeats while it claims.
    AnswersWhileClaiming,
    /// The primary's guest keeps running after the lease has ended.
    RunsOnWithoutLease,
    /// A planned takeover begins without a check whether the arbiter is in reach.
    HandsOverUnasked,
}

impl Planted {
    /// Every bug, in the order of the type.
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
