//! The outcomes of an outgoing migration, and the reasons why an operator's request is refused.

use sterna_proto::source::Refusal;

use crate::error::MigrationError;
use crate::settings_error::SettingsError;
use crate::start_error::SystemRefusal;

/// How a migration ended at the source.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// The destination has the guest.
    Completed,
    /// The migration was cancelled. The guest is here, as before.
    Cancelled,
    /// The migration failed. The guest is here, as before, unless [`Outcome::Failed::held`].
    Failed {
        /// The reason of the failure.
        error: MigrationError,
        /// The guest could not be restored and is held; try again with
        /// [`Migration::retry`](crate::Migration::retry).
        held: bool,
    },
}

/// What a VMM that waits for a migration learns ([`Migration::wait_timeout`](crate::Migration::wait_timeout)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Waited {
    /// The migration has ended.
    Ended(Outcome),
    /// The acknowledgement was lost: the guest stays stopped here until the destination answers or an operator
    /// decides ([`Migration::decide`](crate::Migration::decide)). The migration ends then.
    Undecided,
    /// The migration has not ended within the time.
    TimedOut,
}

/// Why a paused postcopy does not resume. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The postcopy is not paused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No destination of this migration can be at that address.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

/// Why a held guest is not released. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RetryError {
    /// No guest is held.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The operating system refused a thread.
    #[error("{0}; try again")]
    System(#[source] SystemRefusal),
}
