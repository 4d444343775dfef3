//! Where received pages go: guest RAM, in place.

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, RamSlice};

use crate::error::MigrationError;
use crate::order::PageRun;

/// Takes pages from any number of receiving lanes at once. A page belongs to at most one lane at a time
/// (the page order sees to it).
pub trait PageSink: Send + Sync {
    /// Where the content of `run` is to be put. Ask just before the payload is read: this is where fresh
    /// memory is populated.
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError>;
    /// The content of `run` stands where [`PageSink::prepare`] said.
    fn commit(&self, run: PageRun) -> Result<(), MigrationError>;
    /// The pages of `run` are zero.
    fn zero(&self, run: PageRun) -> Result<(), MigrationError>;
    /// The content of `run` as it is now: for a page that comes as a difference to it.
    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError>;
    /// Everything that was committed or zeroed on this lane stands where it belongs, so that what another lane
    /// does from now on comes after it.
    fn settle(&self) -> Result<(), MigrationError> {
        Ok(())
    }
}

/// Puts pages straight into guest RAM.
///
/// A zero page that never came before leaves fresh memory alone, so that a sparse guest stays sparse.
pub struct RamSink {
    ram: GuestRam,
    received: DirtyBitmaps,
    may_hold_bytes: Vec<bool>,
    /// Per block: pages may be missing, and are populated just ahead of their payload.
    populates: Vec<bool>,
    cleared: AtomicU64,
}

impl RamSink {
    /// A sink into `ram`; `may_hold_bytes` says of each block whether it may not be all zero now.
    pub fn new(ram: &GuestRam, may_hold_bytes: Vec<bool>) -> Self {
        Self {
            received: DirtyBitmaps::new(ram),
            populates: ram.blocks().iter().map(|block| !block.is_fully_populated()).collect(),
            ram: ram.clone(),
            may_hold_bytes,
            cleared: AtomicU64::new(0),
        }
    }

    /// Zero pages that had to be cleared.
    pub fn cleared_pages(&self) -> u64 {
        self.cleared.load(Ordering::Relaxed)
    }

    fn clear(&self, run: PageRun) -> Result<(), MigrationError> {
        self.ram.block(run.block).zero_pages(run.first, run.count)?;
        self.cleared.fetch_add(run.count, Ordering::Relaxed);
        Ok(())
    }
}

impl PageSink for RamSink {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let block = self.ram.block(run.block);
        let slice = block.slice(run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?;
        let received = self.received.block(run.block);
        if received.set_range(run.first, run.count) > 0 && self.populates[run.block] {
            block.populate(run.first, run.count)?;
        }
        Ok(slice)
    }

    fn commit(&self, _run: PageRun) -> Result<(), MigrationError> {
        Ok(())
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        let received = self.received.block(run.block);
        if self.may_hold_bytes[run.block] {
            received.set_range(run.first, run.count);
            return self.clear(run);
        }
        let mut page = run.first;
        while let Some(seen) = received.next_run(page, run.end(), run.count) {
            self.clear(PageRun { block: run.block, first: seen.first, count: seen.count })?;
            page = seen.first + seen.count;
        }
        received.set_range(run.first, run.count);
        Ok(())
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        Ok(self.ram.block(run.block).read(run.first * PAGE_SIZE as u64, to)?)
    }
}
