//! Why a step of the control thread did not come to its end.

use crate::error::{MigrationError, VmError};

/// A step ends early because the machine wants something else done first, or because it failed.
#[derive(Debug)]
pub(super) enum Break {
    /// The machine wants something else done first. Nothing is wrong.
    Interrupted,
    /// It failed.
    Failed(MigrationError),
}

impl From<MigrationError> for Break {
    fn from(error: MigrationError) -> Self {
        Self::Failed(error)
    }
}

impl From<VmError> for Break {
    fn from(error: VmError) -> Self {
        Self::Failed(error.into())
    }
}
