//! What threads other than those of the streams themselves ask of devices' streams.

use crate::error::MigrationError;
use crate::stats::StreamStatistics;

/// The streams of a migration, as the return path, an operator and the end of the migration see them.
pub(super) trait RunningStreams: Send + Sync {
    /// The destination has room for so many bytes more of a device's stream.
    fn grant(&self, name: &str, instance: u32, bytes: u64) -> Result<(), MigrationError>;
    /// Every device has a counterpart that grants it room.
    fn all_granted(&self) -> Result<(), MigrationError>;
    /// The statistics of each.
    fn statistics(&self) -> Vec<StreamStatistics>;
    /// Nobody waits any more: save threads end.
    fn close(&self);
}
