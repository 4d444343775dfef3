//! The state of a destination's pages: received or not, and whether they may hold bytes. Pure: a [`Memory`]
//! stores the bytes.
//!
//! | event | received | may hold bytes |
//! | --- | --- | --- |
//! | the first page is received | unchanged | set for pages that are in memory, unless the memory is fresh |
//! | content is about to be stored | set | set |
//! | a page is received as zero | set | zeros are stored where it is set, and then it is cleared unless an adapter may write the page |
//! | all pages were received ([`Record::finish`]) | unchanged | as for zero, but only for pages that were not received |
//! | the connection is lost, and the source reconnects | unchanged | unchanged |
//! | the migration failed ([`Record::empty`]) | unchanged | zeros are stored where it is set |
//!
//! [`Record::finish`] does not end the migration, because the connection can be lost before the commit. The
//! guest then runs at the source, and the source may send any page as zero over the next connection. Therefore
//! no event clears the mark *may hold bytes* of a page without storing zeros there.

use std::sync::atomic::Ordering;

use sterna_ram::{DirtyBitmaps, GuestRam, PageBitmap, Run};

use crate::order::PageRun;

/// The bytes of the pages that a [`Record`] describes.
pub(super) trait Memory {
    /// The error of an attempt to store zeros.
    type Error;

    /// Makes pages zero. Pages that are already zero need not be written.
    fn zero(&self, run: PageRun) -> Result<(), Self::Error>;

    /// The first pages of `run` that an adapter may write at any time.
    fn pinned_in(&self, run: PageRun) -> Option<Run>;
}

/// Two marks for every page of a guest's memory at its destination.
pub(super) struct Record {
    received: DirtyBitmaps,
    may_hold: DirtyBitmaps,
}

impl Record {
    /// Starts with no page received, and no page that may hold bytes.
    pub(super) fn new(ram: &GuestRam) -> Self {
        Self { received: DirtyBitmaps::new(ram), may_hold: DirtyBitmaps::new(ram) }
    }

    /// Pages that were received, with content or as zero.
    pub(super) fn received(&self) -> &DirtyBitmaps {
        &self.received
    }

    /// Whether a page may hold other bytes than zeros.
    #[cfg(feature = "rdma")]
    pub(super) fn may_hold(&self, block: usize, page: u64) -> bool {
        self.may_hold.block(block).get(page)
    }

    /// Marks every page of a block as possibly holding bytes, except the `absent` ones. Call this before the
    /// first page is stored.
    pub(super) fn found(&self, block: usize, absent: &PageBitmap) {
        let held = self.may_hold.block(block);
        held.set_all();
        for (held, absent) in held.words().iter().zip(absent.words()) {
            held.fetch_and(!absent.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Records that content of pages is about to be stored. Returns how many of them were not received before.
    pub(super) fn content(&self, run: PageRun) -> u64 {
        self.may_hold.block(run.block).set_range(run.first, run.count);
        self.received.block(run.block).set_range(run.first, run.count)
    }

    /// Makes pages zero that were received as zero. Returns how many of them may have held bytes.
    pub(super) fn zero<M: Memory>(&self, run: PageRun, memory: &M) -> Result<u64, M::Error> {
        let cleared = self.clear(run, memory)?;
        self.came(run);
        Ok(cleared)
    }

    /// Marks pages as received. Their content must already be in memory.
    pub(super) fn came(&self, run: PageRun) {
        self.received.block(run.block).set_range(run.first, run.count);
    }

    /// Marks pages as not received, because the source has changed them since.
    pub(super) fn forget(&self, run: PageRun) {
        self.received.block(run.block).clear_range(run.first, run.count);
    }

    /// Makes the pages of a block zero that were not received, after all pages were. Returns how many of them
    /// may have held bytes.
    pub(super) fn finish<M: Memory>(&self, block: usize, memory: &M) -> Result<u64, M::Error> {
        let (held, received) = (self.may_hold.block(block), self.received.block(block));
        let unnamed = PageBitmap::new(held.pages());
        for ((to, held), received) in unnamed.words().iter().zip(held.words()).zip(received.words()) {
            to.store(held.load(Ordering::Acquire) & !received.load(Ordering::Acquire), Ordering::Relaxed);
        }
        let (mut from, mut cleared) = (0, 0);
        while let Some(Run { first, count }) = unnamed.next_run(from, unnamed.pages(), u64::MAX) {
            cleared += self.clear(PageRun { block, first, count }, memory)?;
            from = first + count;
        }
        Ok(cleared)
    }

    /// Makes every page of a block zero after the migration has failed. Returns how many of them may have held
    /// bytes.
    pub(super) fn empty<M: Memory>(&self, block: usize, memory: &M) -> Result<u64, M::Error> {
        let count = self.may_hold.block(block).pages();
        self.clear(PageRun { block, first: 0, count }, memory)
    }

    /// Makes the pages of a run zero that may hold bytes.
    fn clear<M: Memory>(&self, run: PageRun, memory: &M) -> Result<u64, M::Error> {
        let held = self.may_hold.block(run.block);
        let (mut from, mut cleared) = (run.first, 0);
        while let Some(Run { first, count }) = held.take_run(from, run.end(), run.count) {
            let pages = PageRun { block: run.block, first, count };
            if let Err(error) = memory.zero(pages) {
                held.set_range(first, count);
                return Err(error);
            }
            // This side does not notice an adapter's writes. Such pages may hold bytes while they are
            // registered.
            let mut unseen = pages.first;
            while unseen < pages.end()
                && let Some(pinned) =
                    memory.pinned_in(PageRun { first: unseen, count: pages.end() - unseen, ..pages })
            {
                held.set_range(pinned.first, pinned.count);
                unseen = pinned.end();
            }
            cleared += count;
            from = first + count;
        }
        Ok(cleared)
    }
}

#[cfg(test)]
mod tests;
