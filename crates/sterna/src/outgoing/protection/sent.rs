//! What lanes have sent of a checkpoint's pages, for the summary at its end (`specs/replica.md §7`).

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna_ram::{PAGE_SIZE, RamFault, RamSlice};
use sterna_wire::replica::PageSums;

use crate::order::PageRun;

/// All lanes add what they send.
#[derive(Default)]
pub(crate) struct SentPages {
    is_counting: AtomicBool,
    sums: Mutex<PageSums>,
}

impl SentPages {
    /// The pages of a checkpoint follow. Lanes see it with the round that is published next.
    pub(crate) fn begin(&self) {
        *self.sums.lock() = PageSums::default();
        self.is_counting.store(true, Ordering::Release);
    }

    /// All lanes are through.
    pub(crate) fn end(&self) -> PageSums {
        self.is_counting.store(false, Ordering::Release);
        *self.sums.lock()
    }

    /// Whether pages are a checkpoint's, and not the seeding's.
    pub(crate) fn is_counting(&self) -> bool {
        self.is_counting.load(Ordering::Acquire)
    }

    /// A lane has sent this.
    pub(crate) fn add(&self, sums: &PageSums) {
        self.sums.lock().add(sums);
    }
}

/// Adds the pages of `run`, whose content nobody changes until it is sent.
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

/// Adds the pages of `run`, which are these bytes.
pub(crate) fn add_bytes(sums: &mut PageSums, run: PageRun, bytes: &[u8]) {
    for (page, content) in (run.first..run.end()).zip(bytes.chunks_exact(PAGE_SIZE)) {
        sums.page(run.block, page, content);
    }
}
