//! Why a step of a migration's thread did not come to its end.

use crate::error::MigrationError;

/// A step ends early because something else has to be done first, or because it failed.
#[derive(Debug)]
pub(crate) enum Break {
    /// The handover machine wants something else done first, or all stops. Nothing is wrong.
    Interrupted,
    /// It failed.
    Failed(MigrationError),
}

impl Break {
    /// What remains of it once its thread has ended: an interruption is no error.
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
