//! Migrations to no standby, because the feature `standby` is off.

use std::sync::Arc;

use super::course::interface::Course;
use super::protection::Protecting;
use super::shared::Shared;
use super::transfer::Transfer;
use crate::error::MigrationError;
use crate::interruption::Break;

pub(super) fn course(_: Arc<Shared>, protecting: Arc<Protecting>) -> Box<dyn Course> {
    match *protecting {}
}

/// Performs `TakeCheckpoints`, which follows only a seeding.
pub(super) fn take(_: &mut Transfer) -> Result<(), Break> {
    Err(MigrationError::Internal("checkpoints without the Cargo feature standby".to_owned()).into())
}
