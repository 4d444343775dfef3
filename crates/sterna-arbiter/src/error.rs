//! Why there is no ruling.

/// There is no ruling: nobody may start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The arbiter was not reached, did not answer in time, or could not decide. Ask again.
    #[error(
        "{arbiter} gives no ruling: {problem}; whether the claim took effect is unknown, so nobody may start: {remedy}"
    )]
    Unreachable {
        /// The arbiter.
        arbiter: String,
        /// What failed.
        problem: String,
        /// What to do next.
        remedy: String,
    },
    /// The arbiter contradicts itself, or holds a claim that cannot be understood. Asking again does not help.
    #[error("{arbiter} cannot be trusted: {problem}; nobody may start: {remedy}")]
    Contradictory {
        /// The arbiter.
        arbiter: String,
        /// What it said or holds.
        problem: String,
        /// What to do next.
        remedy: String,
    },
}

impl ClaimError {
    /// For an arbiter that could not be asked. `remedy` says what to do next.
    pub fn unreachable(
        arbiter: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Unreachable { arbiter: arbiter.into(), problem: problem.into(), remedy: remedy.into() }
    }

    /// For an arbiter that contradicts itself. `remedy` says what to do next.
    pub fn contradictory(
        arbiter: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Contradictory { arbiter: arbiter.into(), problem: problem.into(), remedy: remedy.into() }
    }

    /// Whether asking again cannot help.
    pub fn is_contradictory(&self) -> bool {
        matches!(self, Self::Contradictory { .. })
    }
}
