//! Who decides, beside the store, whether a checkpoint may become held.

use crate::error::MigrationError;

/// The contact with the primary, as the store sees it.
pub(super) trait Witness: Send + Sync {
    /// Checkpoint `number` has come whole and was checked; it is held when this returns true, and never if it returns false. Called
    /// under the store's lock, so that whoever takes over sees either both or neither.
    fn may_hold(&self, number: u64) -> bool;
    /// What brings the checkpoints has failed.
    fn lost(&self, why: &MigrationError);
}
