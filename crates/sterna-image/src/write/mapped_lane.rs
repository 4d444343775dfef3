//! One thread's writes to a mapped-ram image: queued, merged, with a cache for deltas.

use std::collections::BTreeMap;
use std::sync::Arc;

use sterna_transport::{PageQueue, QueueOptions};
use sterna_wire::{PAGE_SIZE, xbzrle};

use super::mapped_file::MappedFile;
use crate::error::ImageError;
use crate::read::body::RecordSink;
use crate::read::visitor::PageVisitor;

/// Writes pages to a mapped-ram image from one thread.
///
/// Different lanes must write different pages. One lane may write a page several times.
pub struct MappedLane {
    inner: Arc<MappedFile>,
    queue: PageQueue,
    /// Pages whose writes may be in flight; adjacent pages are one entry.
    on_the_way: Vec<(usize, u64, u64)>,
    /// Pages that deltas have changed and that are not queued yet, by block and number.
    ///
    /// A source that sends deltas sends the same pages repeatedly. Without this cache, each delta would need a read
    /// from the file.
    changed: BTreeMap<(usize, u64), Box<[u8; PAGE_SIZE]>>,
    /// The limit of pages in `changed`. At the limit, all of them are written.
    changed_most: usize,
}

/// The limit of entries in [`MappedLane::on_the_way`], because every search scans them all.
const ON_THE_WAY: usize = 256;
/// The limit of pages in [`MappedLane::changed`]: 64 MiB, the default of QEMU's `xbzrle-cache-size`.
const CHANGED: usize = 16_384;

impl MappedLane {
    pub(super) fn new(inner: Arc<MappedFile>) -> Self {
        let queue = PageQueue::new(&inner.file, QueueOptions::default());
        Self { inner, queue, on_the_way: Vec::new(), changed: BTreeMap::new(), changed_most: CHANGED }
    }

    /// Waits until all pages are written.
    ///
    /// # Errors
    /// [`ImageError::File`] if a write fails.
    pub fn drain(&mut self) -> Result<(), ImageError> {
        self.write_changed()?;
        self.drain_queue()
    }

    fn drain_queue(&mut self) -> Result<(), ImageError> {
        self.on_the_way.clear();
        Ok(self.queue.drain()?)
    }

    fn write_changed(&mut self) -> Result<(), ImageError> {
        for ((block, page), content) in std::mem::take(&mut self.changed) {
            self.write(block, page, &*content)?;
        }
        Ok(())
    }

    fn write(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        let count = (content.len() / PAGE_SIZE) as u64;
        self.announce(block, first, count)?;
        let placed = &self.inner.blocks[block];
        self.queue.write_bytes(placed.header.page_offset(first), content)?;
        placed.held.set_range(first, count);
        Ok(())
    }

    /// Waits for earlier writes of the same pages. Writes in flight can overtake each other.
    fn announce(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        let is_again = self.inner.blocks[block].written.set_range(first, count) < count;
        if is_again && self.is_on_the_way(block, first, count) {
            self.drain_queue()?;
        }
        match self.on_the_way.last_mut() {
            Some(last) if last.0 == block && last.2 == first => last.2 += count,
            _ => {
                if self.on_the_way.len() == ON_THE_WAY {
                    self.drain_queue()?;
                }
                self.on_the_way.push((block, first, first + count));
            }
        }
        Ok(())
    }

    fn is_on_the_way(&self, block: usize, first: u64, count: u64) -> bool {
        self.on_the_way.iter().any(|entry| entry.0 == block && entry.1 < first + count && first < entry.2)
    }

    /// Drops cached pages that a new write replaces.
    fn forget_changed(&mut self, block: usize, first: u64, count: u64) {
        if self.changed.is_empty() {
            return;
        }
        let range = (block, first)..(block, first + count);
        let over: Vec<_> = self.changed.range(range).map(|(place, _)| *place).collect();
        for place in over {
            self.changed.remove(&place);
        }
    }
}

impl PageVisitor for MappedLane {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        self.forget_changed(block, first, (content.len() / PAGE_SIZE) as u64);
        self.write(block, first, content)
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        self.forget_changed(block, first, count);
        self.inner.blocks[block].held.clear_range(first, count);
        Ok(())
    }
}

impl RecordSink for MappedLane {
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.pages(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        PageVisitor::zero(self, block, page, 1)
    }

    fn delta(&mut self, block: usize, page: u64, delta: &[u8]) -> Result<(), ImageError> {
        if let Some(content) = self.changed.get_mut(&(block, page)) {
            xbzrle::apply(delta, content)?;
            return Ok(());
        }
        if self.changed.len() >= self.changed_most {
            self.write_changed()?;
        }
        if self.is_on_the_way(block, page, 1) {
            self.drain_queue()?;
        }
        let mut content = Box::new([0; PAGE_SIZE]);
        self.inner.read(block, page, &mut content)?;
        xbzrle::apply(delta, &mut content)?;
        self.changed.insert((block, page), content);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BlockShape, Shape};
    use crate::write::MappedWriter;

    const PAGES: u64 = 300;

    fn writer(directory: &std::path::Path) -> MappedWriter {
        let mut shape = Shape::empty();
        shape.ram.blocks.push(BlockShape {
            name: "pc.ram".to_owned(),
            length_bytes: PAGES * PAGE_SIZE as u64,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        });
        MappedWriter::temporary(directory, &shape).unwrap()
    }

    fn page_of(writer: &MappedWriter, page: u64) -> [u8; PAGE_SIZE] {
        let mut content = [0xee; PAGE_SIZE];
        writer.read(0, page, &mut content).unwrap();
        content
    }

    #[test]
    fn differences_of_one_page_are_read_once_and_written_once() {
        let directory = tempfile::tempdir().unwrap();
        let writer = writer(directory.path());
        let mut lane = writer.lane();
        lane.pages(0, 7, &[1; PAGE_SIZE]).unwrap();

        for value in 2..100 {
            lane.delta(0, 7, &[9, 1, value]).unwrap();
            assert_eq!(lane.changed.len(), 1);
            // Only the first delta waited for writes in flight; no further write was queued.
            assert!(lane.on_the_way.is_empty());
        }
        lane.drain().unwrap();

        assert_eq!(page_of(&writer, 7)[8..11], [1, 99, 1]);
    }

    #[test]
    fn differences_between_pages_and_zeros_leave_what_came_last() {
        let mut rng = sterna_testing::random("differences_between_pages_and_zeros");
        let mut random = |below: u64| rng.u64(..below);
        let directory = tempfile::tempdir().unwrap();
        let writer = writer(directory.path());
        let mut lane = writer.lane();
        lane.changed_most = 20;
        let mut model = vec![[0u8; PAGE_SIZE]; PAGES as usize];

        for _ in 0..10_000 {
            let (page, value) = (random(PAGES), 1 + random(255) as u8);
            let count = 1 + random(20).min(PAGES - page - 1);
            let range = page as usize..(page + count) as usize;
            match random(12) {
                0 => {
                    model[range].fill([value; PAGE_SIZE]);
                    lane.pages(0, page, &vec![value; count as usize * PAGE_SIZE]).unwrap();
                }
                1 => {
                    model[range].fill([0; PAGE_SIZE]);
                    PageVisitor::zero(&mut lane, 0, page, count).unwrap();
                }
                _ => {
                    let skip = 1 + random(120) as u8;
                    model[page as usize][usize::from(skip)] = value;
                    lane.delta(0, page, &[skip, 1, value]).unwrap();
                }
            }
        }
        lane.drain().unwrap();

        for page in 0..PAGES {
            assert!(page_of(&writer, page) == model[page as usize], "page {page}");
        }
    }
}
