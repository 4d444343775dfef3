//! Errors of an arbiter that gave no ruling.

/// The arbiter gave no ruling, so the caller must not start the guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The arbiter was not reached, did not answer in time, or could not decide. The caller should repeat the
    /// claim.
    #[error(
        "{arbiter} gives no ruling: {problem}; it is unknown whether the claim was won, so the guest must not start \
         on either side: {remedy}"
    )]
    Unreachable {
        /// The name of the arbiter, with its kind.
        arbiter: String,
        /// The failed step and its cause.
        problem: String,
        /// The next step for the operator.
        remedy: String,
    },
    /// The arbiter contradicts itself, or stores a claim that cannot be decoded. Repeating the claim does not
    /// help.
    #[error("{arbiter} contradicts itself: {problem}; the guest must not start on either side: {remedy}")]
    Contradictory {
        /// The name of the arbiter, with its kind.
        arbiter: String,
        /// The contradictory answer or the stored content.
        problem: String,
        /// The next step for the operator.
        remedy: String,
    },
}

impl ClaimError {
    /// Makes the error for an arbiter that could not be asked. `remedy` is the next step for the operator.
    pub fn unreachable(
        arbiter: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Unreachable { arbiter: arbiter.into(), problem: problem.into(), remedy: remedy.into() }
    }

    /// Makes the error for an arbiter that contradicts itself. `remedy` is the next step for the operator.
    pub fn contradictory(
        arbiter: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Contradictory { arbiter: arbiter.into(), problem: problem.into(), remedy: remedy.into() }
    }

    /// Whether a repeated claim cannot succeed.
    pub fn is_contradictory(&self) -> bool {
        matches!(self, Self::Contradictory { .. })
    }
}
