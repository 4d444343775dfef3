//! Bugs planted on purpose, to prove that the simulator finds them.
//!
//! Without `cfg(test)` or the feature `sim` there is no way to set one: the
//! struct below is empty and every question is answered with a constant no.

/// A bug that a machine can be made to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Planted {
    /// Destination: answers the PREPARE ping before all is loaded.
    AcknowledgeBeforeLoad,
    /// Destination: answers the PREPARE ping before its hooks are acquired.
    AcknowledgeBeforeHooks,
    /// Destination: answers *never* while it may still commit.
    AnswerNeverThenCommit,
    /// Destination: answers *committed* while the start may still fail.
    AnswerCommittedBeforeStart,
    /// Destination: sends SHUT 0 before the guest was started.
    ShutBeforeStart,
    /// Destination: reports failure while it still holds the hooks.
    ShutFailureBeforeHooksBack,
    /// Destination: starts the guest when the connection is lost in Prepared.
    CommitOnLoss,
    /// Destination: fails without giving its hooks back.
    KeepHooks,
    /// Destination: fails without resetting the memory.
    KeepMemory,
    /// Source: runs the guest again when the connection is lost after EOF.
    ResumeAfterCommit,
    /// Source: runs the guest again when SHUT does not come in time.
    ResumeAfterSilence,
    /// Source: cancels after EOF.
    CancelAfterCommit,
    /// Source: takes "unknown migration" for "never".
    UnknownMeansNever,
    /// Source: takes "pending" for "never".
    PendingMeansNever,
    /// Source: sends EOF without waiting for the PONG.
    CommitWithoutPrepare,
    /// Source: resumes the guest twice.
    ResumeTwice,
    /// Source: resumes a guest that was paused before.
    ResumePaused,
    /// Source: resumes the guest before the hooks are back.
    ResumeBeforeHooks,
    /// Source: forgets to stop dirty tracking when it fails.
    ForgetTracking,
    /// Source: forgets to resume the guest when a stop that was under way
    /// ends after the cancel.
    ForgetLateStop,
}

#[cfg(any(test, feature = "sim"))]
impl Planted {
    /// Every planted bug.
    pub const ALL: [Self; 20] = [
        Self::AcknowledgeBeforeLoad,
        Self::AcknowledgeBeforeHooks,
        Self::AnswerNeverThenCommit,
        Self::AnswerCommittedBeforeStart,
        Self::ShutBeforeStart,
        Self::ShutFailureBeforeHooksBack,
        Self::CommitOnLoss,
        Self::KeepHooks,
        Self::KeepMemory,
        Self::ResumeAfterCommit,
        Self::ResumeAfterSilence,
        Self::CancelAfterCommit,
        Self::UnknownMeansNever,
        Self::PendingMeansNever,
        Self::CommitWithoutPrepare,
        Self::ResumeTwice,
        Self::ResumePaused,
        Self::ResumeBeforeHooks,
        Self::ForgetTracking,
        Self::ForgetLateStop,
    ];
}

/// The bug that a machine has, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bug {
    #[cfg(any(test, feature = "sim"))]
    pub(crate) planted: Option<Planted>,
}

impl Bug {
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn is(self, bug: Planted) -> bool {
        self.planted == Some(bug)
    }

    #[cfg(not(any(test, feature = "sim")))]
    pub(crate) fn is(self, _: Planted) -> bool {
        false
    }
}
