//! Why credentials cannot be used.

/// Error for credentials that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {problem}")]
pub struct CredentialsError {
    /// Path of the file or directory.
    pub file: String,
    /// The problem and a remedy.
    pub problem: String,
}
