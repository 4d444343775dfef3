//! Where received pages go.

use sterna_ram::RamSlice;

use crate::error::MigrationError;
use crate::order::PageRun;

/// Takes pages from any number of receiving lanes at once. A page belongs to at most one lane at a time
/// (the page order sees to it).
pub(crate) trait PageSink: Send + Sync {
    /// Where the content of `run` is to be put. Ask just before the payload is read: this is where fresh
    /// memory is populated.
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError>;
    /// The content of `run` stands where [`PageSink::prepare`] said.
    fn commit(&self, run: PageRun) -> Result<(), MigrationError>;
    /// The pages of `run` are zero.
    fn zero(&self, run: PageRun) -> Result<(), MigrationError>;
    /// The content of `run` as it is now: for a page that comes as a difference to it.
    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError>;
    /// Waits until pages may come. Gives the checkpoint to which packets of differences belong then (`specs/extension.md §10`); `None`:
    /// none may come.
    fn differences(&self) -> Result<Option<u64>, MigrationError> {
        Ok(None)
    }
    /// Everything that was committed or zeroed on this lane stands where it belongs, so that what another lane
    /// does from now on comes after it.
    fn settle(&self) -> Result<(), MigrationError> {
        Ok(())
    }
}
