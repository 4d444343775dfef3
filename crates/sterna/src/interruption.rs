//! Why a step of a migration's thread ended early: an interruption or a failure.

use crate::error::MigrationError;

/// A step ended early because of a more urgent action, or because it failed.
#[derive(Debug)]
pub(crate) enum Break {
    /// The handover machine has a more urgent action, or the migration ends. This is no failure.
    Interrupted,
    /// The step failed.
    Failed(MigrationError),
}

impl Break {
    /// The step's result after its thread has ended: an interruption counts as success.
    pub(crate) fn failure(result: Result<(), Self>) -> Result<(), MigrationError> {
        match result {
            Ok(()) | Err(Self::Interrupted) => Ok(()),
            Err(Self::Failed(error)) => Err(error),
        }
    }
}

impl<E: Into<MigrationError>> From<E> for Break {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}
