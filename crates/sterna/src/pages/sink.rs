//! The interface of the memory in which received pages are stored.

use sterna_ram::RamSlice;

use crate::error::MigrationError;
use crate::order::PageRun;

/// Stores pages of any number of receiving lanes in parallel. The page order ensures that a page belongs to at
/// most one lane at a time.
pub trait PageSink: Send + Sync {
    /// The place for the content of `run`. Call this just before the payload is read, because it populates
    /// fresh memory.
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError>;
    /// The content of `run` is complete at the place that [`PageSink::prepare`] returned.
    fn commit(&self, run: PageRun) -> Result<(), MigrationError>;
    /// Makes the pages of `run` zero.
    fn zero(&self, run: PageRun) -> Result<(), MigrationError>;
    /// Copies the present content of `run`, to which a received difference is applied.
    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError>;
    /// Waits until pages may arrive. Returns the number of the checkpoint to which packets of differences then
    /// belong (`specs/extension.md §10`). `None`: no differences are allowed.
    fn differences(&self) -> Result<Option<u64>, MigrationError> {
        Ok(None)
    }
    /// Completes all pages that this lane has committed or zeroed.
    ///
    /// Later actions of other lanes are then ordered after them.
    fn settle(&self) -> Result<(), MigrationError> {
        Ok(())
    }
}
