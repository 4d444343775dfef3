//! How an outgoing migration ended, and why one cannot begin.

use sterna_proto::source::Refusal;

use crate::error::MigrationError;
use crate::settings_error::SettingsError;

/// How a migration ended at the source.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// The destination has the guest.
    Completed,
    /// Cancelled; the guest is here, as it was.
    Cancelled,
    /// Failed; the guest is here, as it was, unless [`Outcome::Failed::held`].
    Failed {
        /// Why.
        error: MigrationError,
        /// The guest could not be brought back to how it was and is held stopped; [`Migration::retry`](crate::Migration::retry).
        held: bool,
    },
}

/// Why a paused postcopy does not go on. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// It is not paused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No destination of its can be at that address.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

/// Why a held guest is not brought back. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RetryError {
    /// No guest is held.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The operating system refused a thread.
    #[error("{0}; try again")]
    System(String),
}
