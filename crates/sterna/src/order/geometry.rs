//! How RAM is cut into slices (re-armed together) and chunks (claimed together).

use sterna_ram::GuestRam;

/// Pages that are re-armed together: 64 MiB. A CLEAR of the kernel's dirty log costs a call, so not
/// smaller; nothing of a slice can be read before it is done, so not larger.
pub(super) const SLICE_PAGES: u64 = 16 * 1024;

/// Pages that a lane claims together: 2 MiB. Small, so that lanes finish a short last pass together.
pub(super) const CHUNK_PAGES: u64 = 512;

/// A range of pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub block: usize,
    pub first: u64,
    pub end: u64,
}

/// Numbers all chunks and slices of all blocks.
#[derive(Debug)]
pub(super) struct Geometry {
    /// Per block: its pages, the number of its first chunk and of its first slice.
    blocks: Vec<(u64, u64, u64)>,
    chunks: u64,
    slices: u64,
}

impl Geometry {
    pub fn new(ram: &GuestRam) -> Self {
        let mut geometry = Self { blocks: Vec::new(), chunks: 0, slices: 0 };
        for block in ram.blocks() {
            geometry.blocks.push((block.pages(), geometry.chunks, geometry.slices));
            geometry.chunks += block.pages().div_ceil(CHUNK_PAGES);
            geometry.slices += block.pages().div_ceil(SLICE_PAGES);
        }
        geometry
    }

    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    pub fn slices(&self) -> u64 {
        self.slices
    }

    /// The pages of chunk number `chunk`, which must be below [`Geometry::chunks`].
    pub fn chunk(&self, chunk: u64) -> Range {
        let block = self.blocks.partition_point(|&(_, first_chunk, _)| first_chunk <= chunk) - 1;
        let (pages, first_chunk, _) = self.blocks[block];
        let first = (chunk - first_chunk) * CHUNK_PAGES;
        Range { block, first, end: pages.min(first + CHUNK_PAGES) }
    }

    /// The slice that holds page `page` of block `block`: its number and its pages.
    pub fn slice_of(&self, block: usize, page: u64) -> (u64, Range) {
        let (pages, _, first_slice) = self.blocks[block];
        let index = page / SLICE_PAGES;
        let first = index * SLICE_PAGES;
        (first_slice + index, Range { block, first, end: pages.min(first + SLICE_PAGES) })
    }
}
