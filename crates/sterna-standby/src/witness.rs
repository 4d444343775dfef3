//! Interface through which the store asks the contact whether a checkpoint may become held.

use sterna::error::MigrationError;

/// The contact with the primary, as the store uses it.
pub(super) trait Witness: Send + Sync {
    /// Asks whether checkpoint `number`, which is complete and checked, becomes held. If this returns true, it is
    /// held; if false, it never will be. Called under the store's lock, so that a takeover sees both the answer and
    /// the checkpoint, or neither.
    fn may_hold(&self, number: u64) -> bool;
    /// The connection that carries the checkpoints has failed.
    fn lost(&self, why: &MigrationError);
}
