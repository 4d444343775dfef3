//! Where each page of a legacy stream lies: the index that gives random access to it.

use sterna_ram::PageBitmap;
use sterna_wire::PAGE_SHIFT;

use crate::model::BlockShape;

/// Where the pages of a legacy stream lie in its file. The last record of a page counts.
///
/// Takes eight bytes for each page that has content, and one bit for every page.
pub struct PagePlaces {
    blocks: Vec<BlockPlaces>,
}

struct BlockPlaces {
    /// 0 for a page of zeros: the stream's header lies there.
    offsets: Vec<u64>,
    held: PageBitmap,
}

impl PagePlaces {
    /// Of blocks none of whose pages has come.
    pub(crate) fn new(blocks: &[BlockShape]) -> Self {
        let of = |block: &BlockShape| {
            let pages = block.length_bytes >> PAGE_SHIFT;
            // Zeroed by the kernel, a page of them when the first is written.
            BlockPlaces { offsets: vec![0; pages as usize], held: PageBitmap::new(pages) }
        };
        Self { blocks: blocks.iter().map(of).collect() }
    }

    /// Where page `page` of block `block` lies; `None` if it is zero, or was never sent.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn offset(&self, block: usize, page: u64) -> Option<u64> {
        Some(self.blocks[block].offsets[page as usize]).filter(|offset| *offset > 0)
    }

    /// The pages of block `block` that have content; all others are zero.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn held(&self, block: usize) -> &PageBitmap {
        &self.blocks[block].held
    }

    /// A record of the page has its content at `position`.
    pub(crate) fn note(&mut self, block: usize, page: u64, position: u64) {
        let block = &mut self.blocks[block];
        block.offsets[page as usize] = position;
        block.held.set(page);
    }

    /// A record says that the page is zero.
    pub(crate) fn note_zero(&mut self, block: usize, page: u64) {
        let block = &mut self.blocks[block];
        block.offsets[page as usize] = 0;
        block.held.clear(page);
    }
}
