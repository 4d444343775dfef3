//! The interface to device streams for threads other than their own.

use crate::error::MigrationError;
use crate::stats::StreamStatistics;

/// The streams of a migration, for the return path, an operator and the migration's end.
pub(super) trait RunningStreams: Send + Sync {
    /// The destination grants `bytes` of a device's stream.
    fn grant(&self, name: &str, instance: u32, bytes: u64) -> Result<(), MigrationError>;
    /// Checks that every stream has a grant, so that each device has a counterpart.
    fn all_granted(&self) -> Result<(), MigrationError>;
    /// The statistics of each stream.
    fn statistics(&self) -> Vec<StreamStatistics>;
    /// Unblocks all waiting threads: save threads end.
    fn close(&self);
}
