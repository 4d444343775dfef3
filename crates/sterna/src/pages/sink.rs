//! Where received pages go: guest RAM, in place.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, PageBitmap, RamSlice};

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
/// A zero page that never came before leaves fresh memory alone, so that a sparse guest stays sparse. That memory is
/// fresh is no claim of anybody: before the first page is taken, the kernel is asked which pages are there. Those may
/// hold bytes, of a former migration for example, and are cleared by the news that they are zero, or at the end if no
/// news of them came.
pub struct RamSink {
    ram: GuestRam,
    /// Pages that may hold bytes: those that were in memory before the first page was taken, and those that came
    /// with content.
    holds: OnceLock<DirtyBitmaps>,
    /// Pages that came, with content or as zero.
    received: DirtyBitmaps,
    may_hold_bytes: Vec<bool>,
    /// Per block: pages may be missing, and are populated just ahead of their payload.
    populates: Vec<bool>,
    cleared: AtomicU64,
}

impl RamSink {
    /// A sink into `ram`; `may_hold_bytes` says of each block whether the VMM has put bytes there, which stay where
    /// no page comes.
    pub fn new(ram: &GuestRam, may_hold_bytes: Vec<bool>) -> Self {
        Self {
            holds: OnceLock::new(),
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

    /// All pages have come: clears what was in memory before and was named by none of them.
    ///
    /// # Errors
    /// [`MigrationError::Ram`].
    pub fn finish(&self) -> Result<(), MigrationError> {
        for (index, holds) in self.holds().blocks().iter().enumerate() {
            if self.may_hold_bytes[index] {
                continue;
            }
            for (held, came) in holds.words().iter().zip(self.received.block(index).words()) {
                held.fetch_and(!came.load(Ordering::Acquire), Ordering::AcqRel);
            }
            let mut page = 0;
            while let Some(run) = holds.next_run(page, holds.pages(), holds.pages()) {
                self.clear(PageRun { block: index, first: run.first, count: run.count })?;
                page = run.end();
            }
        }
        Ok(())
    }

    /// Asks the kernel which pages are there, when the first page comes.
    fn holds(&self) -> &DirtyBitmaps {
        self.holds.get_or_init(|| {
            let holds = DirtyBitmaps::new(&self.ram);
            holds.set_all();
            for (index, block) in self.ram.blocks().iter().enumerate() {
                let absent = PageBitmap::new(block.pages());
                if self.may_hold_bytes[index] {
                    continue;
                }
                if let Err(error) = block.mark_absent(0, block.pages(), &absent) {
                    // All of them are looked at then.
                    tracing::warn!("which pages of memory are there cannot be told: {error}");
                    continue;
                }
                for (held, absent) in holds.block(index).words().iter().zip(absent.words()) {
                    held.fetch_and(!absent.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            holds
        })
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
        self.holds().block(run.block).set_range(run.first, run.count);
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
        let holds = self.holds().block(run.block);
        let mut page = run.first;
        while let Some(held) = holds.next_run(page, run.end(), run.count) {
            self.clear(PageRun { block: run.block, first: held.first, count: held.count })?;
            page = held.end();
        }
        self.received.block(run.block).set_range(run.first, run.count);
        Ok(())
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        Ok(self.ram.block(run.block).read(run.first * PAGE_SIZE as u64, to)?)
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, RamBlock};

    use super::*;

    #[test]
    fn page_that_was_in_memory_and_is_never_named_is_cleared_at_the_end() {
        let block = |name: &str| RamBlock::new(name, 64 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        let ram = GuestRam::new(vec![block("ram"), block("rom")]).unwrap();
        for page in [3, 4, 40] {
            ram.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap();
            ram.block(1).write(page * PAGE_SIZE as u64, &[1]).unwrap();
        }
        let sink = RamSink::new(&ram, vec![false, true]);
        let came = sink.prepare(PageRun { block: 0, first: 4, count: 1 }).unwrap();
        came.copy_from(&[2; PAGE_SIZE]).unwrap();

        sink.finish().unwrap();

        let is_zero = |block: usize, page| ram.block(block).page(page).unwrap().is_zero().unwrap();
        assert!(is_zero(0, 3) && !is_zero(0, 4) && is_zero(0, 40));
        assert!(!is_zero(1, 3) && !is_zero(1, 40), "the VMM has put these there");
        assert_eq!(ram.block(0).resident_bytes().unwrap(), 3 * PAGE_SIZE as u64, "nothing was populated");
    }
}
