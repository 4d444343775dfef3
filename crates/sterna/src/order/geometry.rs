//! Divides RAM into slices, which are re-armed together, and chunks, which a lane claims together.

use sterna_ram::GuestRam;

use super::SliceSize;

/// Pages that a lane claims together: 512 pages are 2 MiB. Small, so that lanes finish a short last round at
/// the same time.
pub(super) const CHUNK_PAGES: u64 = 512;

/// A range of pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub block: usize,
    pub first: u64,
    pub end: u64,
}

/// Numbers all chunks and all slices over all blocks.
#[derive(Debug)]
pub(super) struct Geometry {
    /// Per block: its number of pages, the number of its first chunk, and the number of its first slice.
    blocks: Vec<(u64, u64, u64)>,
    chunks: u64,
    slices: u64,
    slice_pages: u64,
}

impl Geometry {
    pub(super) fn new(ram: &GuestRam, size: SliceSize) -> Self {
        let slice_pages = size.pages();
        let mut geometry = Self { blocks: Vec::new(), chunks: 0, slices: 0, slice_pages };
        for block in ram.blocks() {
            geometry.blocks.push((block.pages(), geometry.chunks, geometry.slices));
            geometry.chunks += block.pages().div_ceil(CHUNK_PAGES);
            geometry.slices += block.pages().div_ceil(slice_pages);
        }
        geometry
    }

    pub(super) fn chunks(&self) -> u64 {
        self.chunks
    }

    pub(super) fn slices(&self) -> u64 {
        self.slices
    }

    /// The pages of chunk number `chunk`, which must be below [`Geometry::chunks`].
    pub(super) fn chunk(&self, chunk: u64) -> Range {
        let block = self.blocks.partition_point(|&(_, first_chunk, _)| first_chunk <= chunk) - 1;
        let (pages, first_chunk, _) = self.blocks[block];
        let first = (chunk - first_chunk) * CHUNK_PAGES;
        Range { block, first, end: pages.min(first + CHUNK_PAGES) }
    }

    /// The pages of slice number `slice`, if it exists.
    pub(super) fn slice(&self, slice: u64) -> Option<Range> {
        if slice >= self.slices {
            return None;
        }
        let block = self.blocks.partition_point(|&(_, _, first_slice)| first_slice <= slice) - 1;
        let (_, _, first_slice) = self.blocks[block];
        Some(self.slice_of(block, (slice - first_slice) * self.slice_pages).1)
    }

    /// The slice that contains page `page` of block `block`: its number and its pages.
    pub(super) fn slice_of(&self, block: usize, page: u64) -> (u64, Range) {
        let (pages, _, first_slice) = self.blocks[block];
        let index = page / self.slice_pages;
        let first = index * self.slice_pages;
        (first_slice + index, Range { block, first, end: pages.min(first + self.slice_pages) })
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, PAGE_SIZE, RamBlock};

    use super::*;

    fn geometry(pages: &[u64], size: SliceSize) -> Geometry {
        let block = |(index, pages): (usize, &u64)| {
            RamBlock::new(format!("b{index}"), pages * PAGE_SIZE as u64, Backing::Anonymous).unwrap()
        };
        Geometry::new(&GuestRam::new(pages.iter().enumerate().map(block).collect()).unwrap(), size)
    }

    #[test]
    fn chunks_cover_every_page_once_in_order() {
        let sizes = [1, 512, 513, 40_000];
        let geometry = geometry(&sizes, SliceSize::default());
        let mut next = (0, 0);
        for chunk in (0..geometry.chunks()).map(|number| geometry.chunk(number)) {
            if next.1 == sizes[next.0] {
                next = (next.0 + 1, 0);
            }
            assert_eq!((chunk.block, chunk.first), next);
            assert!(chunk.end > chunk.first && chunk.end - chunk.first <= CHUNK_PAGES);
            next.1 = chunk.end;
        }
        assert_eq!(next, (sizes.len() - 1, sizes[sizes.len() - 1]));
    }

    #[test]
    fn slice_of_a_chunk_holds_the_whole_chunk_and_has_a_number_of_its_own() {
        [SliceSize::LEAST, SliceSize::default(), SliceSize::MOST].into_iter().for_each(check_slices);
    }

    fn check_slices(size: SliceSize) {
        let geometry = geometry(&[1, 512, 513, 40_000], size);
        let mut seen = Vec::new();
        for chunk in (0..geometry.chunks()).map(|number| geometry.chunk(number)) {
            let (number, slice) = geometry.slice_of(chunk.block, chunk.first);
            assert!(slice.block == chunk.block && slice.first <= chunk.first && chunk.end <= slice.end);
            assert!(slice.first.is_multiple_of(64), "sources re-arm whole words");
            if seen.last() != Some(&(number, slice)) {
                seen.push((number, slice));
            }
        }
        let numbers: Vec<u64> = seen.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (0..geometry.slices()).collect::<Vec<_>>());
    }
}
