//! Sums of the pages that lanes have sent for a checkpoint (`specs/replica.md §7`).
//!
//! The summary at the checkpoint's end contains them.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna_ram::{PAGE_SIZE, RamFault, RamSlice};
use sterna_wire::replica::PageSums;

use crate::order::PageRun;

/// The sums of the present checkpoint. All lanes add to them.
#[derive(Default)]
pub(crate) struct SentPages {
    is_counting: AtomicBool,
    sums: Mutex<PageSums>,
}

impl SentPages {
    /// Resets the sums for a checkpoint. Lanes see it with the next round that is published.
    pub(crate) fn begin(&self) {
        *self.sums.lock() = PageSums::default();
        self.is_counting.store(true, Ordering::Release);
    }

    /// The sums after all lanes have sent their pages.
    pub(crate) fn end(&self) -> PageSums {
        self.is_counting.store(false, Ordering::Release);
        *self.sums.lock()
    }

    /// Whether lanes send a checkpoint's pages; false in the seeding.
    pub(crate) fn is_counting(&self) -> bool {
        self.is_counting.load(Ordering::Acquire)
    }

    /// Adds the sums of one lane.
    pub(crate) fn add(&self, sums: &PageSums) {
        self.sums.lock().add(sums);
    }
}

/// Adds the pages of `run`. No thread may change their content until it is sent.
pub(crate) fn add_copied(sums: &mut PageSums, run: PageRun, content: &RamSlice<'_>) -> Result<(), RamFault> {
    let mut bytes = [0; PAGE_SIZE];
    for page in 0..run.count {
        if let Some(content) = content.part(page as usize * PAGE_SIZE, PAGE_SIZE) {
            content.copy_to(&mut bytes)?;
            sums.page(run.block, run.first + page, &bytes);
        }
    }
    Ok(())
}

/// Adds the pages of `run` with the content `bytes`.
pub(crate) fn add_bytes(sums: &mut PageSums, run: PageRun, bytes: &[u8]) {
    for (page, content) in (run.first..run.end()).zip(bytes.chunks_exact(PAGE_SIZE)) {
        sums.page(run.block, page, content);
    }
}
