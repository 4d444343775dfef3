//! Guest memory that the source writes by RDMA, so that this side does not notice the arrival of pages.

use std::sync::atomic::Ordering;

use sterna_ram::{PAGE_SHIFT, PAGE_SIZE};

use super::RamSink;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageSink;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

impl RamSink {
    /// Prepares `length` bytes from `start`, which must be whole pages, for the source's writes. Each page is
    /// populated, counts as received, and may hold bytes.
    pub(crate) fn open(&self, block: usize, start: u64, length: u64) -> Result<(), MigrationError> {
        let run = PageRun { block, first: start >> PAGE_SHIFT, count: length >> PAGE_SHIFT };
        self.prepare(run).map(drop)
    }

    /// Prepares a whole block that is registered with an adapter on demand. From now on the source may write
    /// any page. Pages are neither populated nor kept in place.
    ///
    /// Bytes of an earlier guest are cleared before, because this side does not notice which pages the source
    /// writes.
    pub(crate) fn follow(&self, block: usize) -> Result<(), MigrationError> {
        let all = PageRun { block, first: 0, count: self.ram.block(block).pages() };
        let record = self.looked();
        if !self.may_hold_bytes[block] {
            self.count(record.empty(block, &self.ram)?);
        }
        self.is_followed[block].store(true, Ordering::Release);
        record.content(all);
        Ok(())
    }

    /// Makes `length` bytes from `start` zero. The range may begin and end inside a page. Returns the number of
    /// whole pages in the range. Populates no page.
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

    /// Makes a part of one page zero. A page without bytes is already zero, and stays unpopulated.
    fn zero_part(&self, block: usize, start: u64, length: u64) -> Result<(), MigrationError> {
        let page = start >> PAGE_SHIFT;
        if length > 0 && self.looked().may_hold(block, page) {
            self.ram.block(block).slice(start, length as usize)?.fill_zero()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_ram::{Backing, GuestRam, RamBlock};

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
                // The adapter writes the page.
                block.write(5 * PAGE_BYTES, &[7; PAGE_SIZE]).unwrap();

                sink.zero_range(0, 0, PAGES * PAGE_BYTES).unwrap();

                assert_eq!(byte(&sink, 5 * PAGE_BYTES), 0, "{backing:?}, round {round}");
                let resident = block.resident_bytes().unwrap();
                assert_eq!(resident, PAGES * PAGE_BYTES, "{backing:?}: pages were given back under the pin");
            }
            // A part of the registered range.
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
        // Inside one page, over a page boundary, from a boundary on, up to a boundary, whole.
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
