//! The memory in an image of Sterna's own format: frames that are read, checked and decompressed when they are needed.

use std::convert::Infallible;
use std::sync::Arc;

use sterna_store::{PageRange, StoredImage};

use crate::source::{PAGE_BYTES, PageSource, SourceError};
use crate::working_set::WorkingSet;

/// An image of Sterna's format. The memory is its RAM blocks in their order.
///
/// No page is given away before its frame's digest was checked.
pub struct StoredMemory {
    image: Arc<StoredImage>,
    /// Offset of each block in the memory.
    starts: Vec<u64>,
    bytes: u64,
}

impl StoredMemory {
    /// Takes an open image.
    ///
    /// # Errors
    /// [`SourceError::Length`] if it has no memory.
    pub fn new(image: Arc<StoredImage>) -> Result<Self, SourceError> {
        let (mut starts, mut bytes) = (Vec::new(), 0u64);
        for block in image.blocks() {
            starts.push(bytes);
            bytes += block.length_bytes;
        }
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(SourceError::Length { name: image.name().to_owned(), bytes });
        }
        Ok(Self { image, starts, bytes })
    }

    /// The image.
    pub fn image(&self) -> &Arc<StoredImage> {
        &self.image
    }

    /// A recorded working set as pages of the image's blocks.
    pub fn ranges(&self, set: &WorkingSet) -> Vec<PageRange> {
        let mut ranges = Vec::new();
        for (offset, bytes) in &set.runs {
            let done = self.parts(*offset, *bytes, |block, at, bytes| {
                let (first, end) = (at / PAGE_BYTES, (at + bytes).div_ceil(PAGE_BYTES));
                ranges.push(PageRange { block: block as u32, count: (end - first) as u32, first });
                Ok::<(), Infallible>(())
            });
            let Ok(()) = done;
        }
        ranges
    }

    /// Calls `each` with the block, the offset in the block, and the length of each part of these bytes.
    fn parts<E>(
        &self,
        offset: u64,
        bytes: u64,
        mut each: impl FnMut(usize, u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            // Several blocks begin at the same offset if some are empty: the last of them has the byte.
            let block = self.starts.partition_point(|start| *start <= at) - 1;
            let limit = self.starts.get(block + 1).copied().unwrap_or(self.bytes).min(end);
            each(block, at - self.starts[block], limit - at)?;
            at = limit;
        }
        Ok(())
    }
}

impl PageSource for StoredMemory {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn len_bytes(&self) -> u64 {
        self.bytes
    }

    fn frame_bytes(&self) -> u64 {
        self.image.extent_bytes().into()
    }

    fn is_zero(&self, offset: u64, bytes: u64) -> bool {
        let held = self.parts(offset, bytes, |block, at, bytes| {
            let mut pages = at / PAGE_BYTES..(at + bytes).div_ceil(PAGE_BYTES);
            if pages.any(|page| self.image.is_held(block, page)) { Err(()) } else { Ok(()) }
        });
        held.is_ok()
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        // A frame is decompressed and checked, which takes longer than other faults should wait.
        Ok(false)
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        let mut done = 0;
        self.parts(offset, to.len() as u64, |block, at, bytes| {
            let part = &mut to[done..done + bytes as usize];
            done += bytes as usize;
            Ok(self.image.read(block, at, part)?)
        })
    }

    fn working_set(&self) -> Option<WorkingSet> {
        let ranges = self.image.working_set();
        let run = |range: &PageRange| {
            let block = range.block as usize;
            // The last page of a block may be incomplete.
            let length = self.image.blocks()[block].length_bytes;
            let start = range.first * PAGE_BYTES;
            (self.starts[block] + start, (u64::from(range.count) * PAGE_BYTES).min(length - start))
        };
        let runs = ranges.iter().map(run).collect();
        (!ranges.is_empty()).then_some(WorkingSet { memory_bytes: self.bytes, runs })
    }
}
