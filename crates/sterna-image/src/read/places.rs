//! The index of a legacy stream's pages, for random access.

use sterna_ram::PageBitmap;
use sterna_wire::PAGE_SHIFT;

use crate::model::BlockShape;

/// The places of a legacy stream's pages in its file. The last record of a page counts.
///
/// The index takes eight bytes for each page with content, and one bit for every page.
pub struct PagePlaces {
    blocks: Vec<BlockPlaces>,
}

struct BlockPlaces {
    /// File offset of each page; 0 for a zero page.
    ///
    /// 0 is free because the stream's header is there.
    offsets: Vec<u64>,
    held: PageBitmap,
}

impl PagePlaces {
    /// An index of blocks whose pages were not read yet.
    pub(crate) fn new(blocks: &[BlockShape]) -> Self {
        let of = |block: &BlockShape| {
            let pages = block.length_bytes >> PAGE_SHIFT;
            // The kernel zeroes this memory and allocates it only when it is written.
            BlockPlaces { offsets: vec![0; pages as usize], held: PageBitmap::new(pages) }
        };
        Self { blocks: blocks.iter().map(of).collect() }
    }

    /// File offset of page `page` of block `block`; `None` if zero or never sent.
    ///
    /// # Panics
    /// If the block or the page does not exist.
    pub fn offset(&self, block: usize, page: u64) -> Option<u64> {
        Some(self.blocks[block].offsets[page as usize]).filter(|offset| *offset > 0)
    }

    /// The pages of block `block` that have content; all others are zero.
    ///
    /// # Panics
    /// If the block does not exist.
    pub fn held(&self, block: usize) -> &PageBitmap {
        &self.blocks[block].held
    }

    /// Records the offset `position` of a page's content.
    pub(crate) fn note(&mut self, block: usize, page: u64, position: u64) {
        let block = &mut self.blocks[block];
        block.offsets[page as usize] = position;
        block.held.set(page);
    }

    /// Records that a page is zero.
    pub(crate) fn note_zero(&mut self, block: usize, page: u64) {
        let block = &mut self.blocks[block];
        block.offsets[page as usize] = 0;
        block.held.clear(page);
    }
}
