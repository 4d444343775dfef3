//! The interfaces of page transfer: a sending lane writes to a [`PageWriter`], and a receiver stores through a
//! [`PageSink`].
//!
//! The two are independent. A writer may encode multifd packets or records of the main channel, or write to a
//! file without a protocol. A sink may be guest RAM, an image, or the memory of a standby.

mod file;
mod ram_sink;
mod sink;
#[cfg(test)]
mod tests;

pub(crate) use file::{FileWriter, MappedFile};
pub use ram_sink::RamSink;
pub use sink::PageSink;

#[cfg(feature = "postcopy")]
use sterna_transport::Channel;

use crate::error::MigrationError;
use crate::order::PageRun;

/// Transfers runs of pages for one lane.
pub(crate) trait PageWriter: Send {
    /// Transfers the content of `run`. The guest may write the pages meanwhile. The transferred content is then
    /// stale or torn, and the page is reported dirty.
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError>;
    /// Transfers the information that the pages of `run` are zero.
    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError>;
    /// As [`PageWriter::zero_run`], for pages that were never populated and must not be read.
    fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.zero_run(run)
    }
    /// Transfers one packet with a chunk of a device stream. Called only if device streams use lanes.
    fn device_packet(&mut self, packet: &[u8]) -> Result<(), MigrationError> {
        let _ = packet;
        Err(MigrationError::Internal("this writer carries pages alone".to_owned()))
    }
    /// Stops using shared channels. The main channel carries the pages that the destination waits for.
    #[cfg(feature = "postcopy")]
    fn keep_to_itself(&mut self) {}
    /// The channel that only this writer uses, if there is one.
    #[cfg(feature = "postcopy")]
    fn channel(&self) -> Option<&Channel> {
        None
    }
    /// Waits until all earlier pages are out, so that later ones cannot overtake them.
    fn barrier(&mut self) -> Result<(), MigrationError>;
    /// Aborts the migration: wakes blocked threads, and drops pages that are not out.
    fn abort(&mut self);
}
