//! Migrations to no standby, because the feature `standby` is off.

use super::transfer::Transfer;
use crate::error::MigrationError;
use crate::interruption::Break;

/// Performs `TakeCheckpoints`, which follows only a seeding.
pub(super) fn take(_: &mut Transfer) -> Result<(), Break> {
    Err(MigrationError::Internal("checkpoints without the Cargo feature standby".to_owned()).into())
}

/// The seeding of a standby.
pub(super) mod seeding {
    use std::sync::Arc;

    use crate::outgoing::course::interface::Course;
    use crate::outgoing::protection::Protecting;
    use crate::outgoing::shared::Shared;

    pub(in crate::outgoing) fn course(_: Arc<Shared>, protecting: Arc<Protecting>) -> Box<dyn Course> {
        match *protecting {}
    }
}
