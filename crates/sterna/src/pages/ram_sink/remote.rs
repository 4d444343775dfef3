//! Guest memory that the source writes itself, by RDMA: this side sees no page come.

use std::sync::atomic::Ordering;

use sterna_ram::{PAGE_SHIFT, PAGE_SIZE, PageBitmap, RamBlock, Run};

use super::RamSink;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageSink;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

impl RamSink {
    /// The source may write `length` bytes from `start` on, which are whole pages, from now on: each of these pages
    /// counts as one that came and may hold bytes. They are populated.
    pub(crate) fn open(&self, block: usize, start: u64, length: u64) -> Result<(), MigrationError> {
        let run = PageRun { block, first: start >> PAGE_SHIFT, count: length >> PAGE_SHIFT };
        self.prepare(run).map(drop)
    }

    /// All of a block is registered with an adapter that follows its memory: from now on the source may write any page, and
    /// none is populated or kept in place for that. What an earlier guest has left is cleared before: which pages the source
    /// writes is not seen.
    pub(crate) fn follow(&self, block: usize) -> Result<(), MigrationError> {
        let all = PageRun { block, first: 0, count: self.ram.block(block).pages() };
        if !self.may_hold_bytes[block] {
            self.clear(all)?;
        }
        self.is_followed[block].store(true, Ordering::Release);
        self.holds().block(block).set_all();
        self.received.block(block).set_all();
        Ok(())
    }

    pub(super) fn is_followed(&self, block: usize) -> bool {
        self.is_followed[block].load(Ordering::Acquire)
    }

    /// `length` bytes from `start` on are zero. The range may begin and end inside a page. Gives how many whole pages it
    /// has. Nothing is populated by this.
    pub(crate) fn zero_range(&self, block: usize, start: u64, length: u64) -> Result<u64, MigrationError> {
        let end = start + length;
        let (first, last) = (start.div_ceil(PAGE_BYTES), end >> PAGE_SHIFT);
        if first > last {
            self.zero_part(block, start, length)?;
            return Ok(0);
        }
        self.zero_part(block, start, first * PAGE_BYTES - start)?;
        if first < last {
            self.zero(PageRun { block, first, count: last - first })?;
        }
        self.zero_part(block, last * PAGE_BYTES, end - last * PAGE_BYTES)?;
        Ok(last - first)
    }

    /// A part of one page is zero. A page that holds no bytes is zero as it is, and stays unpopulated.
    fn zero_part(&self, block: usize, start: u64, length: u64) -> Result<(), MigrationError> {
        let page = start >> PAGE_SHIFT;
        if length > 0 && self.holds().block(block).get(page) {
            self.ram.block(block).slice(start, length as usize)?.fill_zero()?;
        }
        Ok(())
    }
}

/// Pages that are registered may be written at any time, and nobody here sees it: they hold bytes as long as they are.
pub(super) fn hold_what_is_pinned(block: &RamBlock, holds: &PageBitmap, run: Run) {
    let mut page = run.first;
    while let Some(pinned) = block.pinned_in(page, run.end() - page) {
        holds.set_range(pinned.first, pinned.count);
        page = pinned.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_ram::{Backing, GuestRam};

    const PAGES: u64 = 1024;

    fn sink(backing: Backing) -> RamSink {
        let block = RamBlock::new("ram", PAGES * PAGE_BYTES, backing).unwrap();
        RamSink::new(&GuestRam::new(vec![block]).unwrap(), vec![false]).unwrap()
    }

    fn byte(sink: &RamSink, offset: u64) -> u8 {
        let mut byte = [0];
        sink.ram.block(0).read(offset, &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn page_that_is_written_again_under_a_registration_is_cleared_again() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let sink = sink(backing);
            let block = sink.ram.block(0).clone();
            sink.open(0, 0, PAGES * PAGE_BYTES).unwrap();
            let pin = block.pin(0, PAGES * PAGE_BYTES).unwrap();
            for round in 0..3 {
                // The adapter's doing.
                block.write(5 * PAGE_BYTES, &[7; PAGE_SIZE]).unwrap();

                sink.zero_range(0, 0, PAGES * PAGE_BYTES).unwrap();

                assert_eq!(byte(&sink, 5 * PAGE_BYTES), 0, "{backing:?}, round {round}");
                let resident = block.resident_bytes().unwrap();
                assert_eq!(resident, PAGES * PAGE_BYTES, "{backing:?}: pages were given back under the pin");
            }
            // A part of what is registered.
            block.write(5 * PAGE_BYTES, &[7]).unwrap();
            assert_eq!(sink.zero_range(0, 4 * PAGE_BYTES, 3 * PAGE_BYTES).unwrap(), 3);
            assert_eq!(byte(&sink, 5 * PAGE_BYTES), 0);
            block.write(5 * PAGE_BYTES, &[7]).unwrap();
            drop(pin);
            sink.zero_range(0, 0, PAGES * PAGE_BYTES).unwrap();
            assert_eq!(block.resident_bytes().unwrap(), 0, "{backing:?}");
        }
    }

    #[test]
    fn zero_range_may_begin_and_end_inside_a_page_and_populates_nothing() {
        let sink = sink(Backing::Memfd);
        let block = sink.ram.block(0).clone();
        assert_eq!(sink.zero_range(0, 100, 5 * PAGE_BYTES).unwrap(), 4);
        assert_eq!(block.resident_bytes().unwrap(), 0);

        sink.open(0, 0, 4 * PAGE_BYTES).unwrap();
        block.write(0, &vec![7; 4 * PAGE_SIZE]).unwrap();
        // Inside one page, over a border, from a border on, up to a border, whole.
        for (start, length, pages) in [(100, 50, 0), (4090, 10, 0), (8192, 7, 0), (12200, 88, 0)] {
            assert_eq!(sink.zero_range(0, start, length).unwrap(), pages, "{start}");
            for (offset, wanted) in [(start - 1, 7), (start, 0), (start + length - 1, 0), (start + length, 7)]
            {
                let is_open = offset < 4 * PAGE_BYTES;
                assert_eq!(byte(&sink, offset), if is_open { wanted } else { 0 }, "{offset} of {start}");
            }
        }
        assert_eq!(sink.zero_range(0, 0, 4 * PAGE_BYTES).unwrap(), 4);
        assert!(block.slice(0, 4 * PAGE_SIZE).unwrap().is_zero().unwrap());
    }
}
