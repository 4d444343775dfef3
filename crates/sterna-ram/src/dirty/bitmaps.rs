//! The page bitmaps of all blocks of a guest, as one value.

use crate::bitmap::PageBitmap;
use crate::guest::GuestRam;

/// One [`PageBitmap`] per block of a guest, such as the dirty pages of a round.
#[derive(Debug)]
pub struct DirtyBitmaps(Vec<PageBitmap>);

impl DirtyBitmaps {
    /// Makes bitmaps for all blocks, with all bits clear.
    pub fn new(ram: &GuestRam) -> Self {
        DirtyBitmaps(ram.blocks().iter().map(|block| PageBitmap::new(block.pages())).collect())
    }

    /// Returns the bitmap of one block.
    ///
    /// # Panics
    /// If there is no block `index`.
    pub fn block(&self, index: usize) -> &PageBitmap {
        &self.0[index]
    }

    /// Returns the bitmap of one block for changes without atomic instructions.
    ///
    /// # Panics
    /// If there is no block `index`.
    pub fn block_mut(&mut self, index: usize) -> &mut PageBitmap {
        &mut self.0[index]
    }

    /// Returns all bitmaps, in the order of the blocks.
    pub fn blocks(&self) -> &[PageBitmap] {
        &self.0
    }

    /// Returns the number of set bits in all blocks.
    pub fn count(&self) -> u64 {
        self.0.iter().map(PageBitmap::count).sum()
    }

    /// Clears every bit. No other thread may change a bit meanwhile (see [`PageBitmap::clear_all`]).
    pub fn clear_all(&self) {
        self.0.iter().for_each(PageBitmap::clear_all);
    }

    /// Sets the bits of all pages. No other thread may change a bit meanwhile (see [`PageBitmap::set_all`]).
    pub fn set_all(&self) {
        self.0.iter().for_each(PageBitmap::set_all);
    }

    /// Sets every bit that is set in `other`, and returns how many were clear before.
    ///
    /// # Panics
    /// If the bitmaps belong to different RAM.
    pub fn or_from(&mut self, other: &DirtyBitmaps) -> u64 {
        self.pairs(other).map(|(to, from)| to.or_from(from)).sum()
    }

    /// Clears every bit that is set in `sent`, and returns how many were set here.
    ///
    /// `sent` is the round that is being sent. These reports are too early, because the pages will be read
    /// later (see [`crate::dirty`]). Lanes may clear bits of `sent` meanwhile. If a bit is cleared after this
    /// check, the result stays correct, because its page is read after the check.
    ///
    /// # Panics
    /// If the bitmaps belong to different RAM.
    pub fn drop_reported(&mut self, sent: &DirtyBitmaps) -> u64 {
        self.pairs(sent).map(|(to, sent)| to.drop_reported(sent)).sum()
    }

    fn pairs<'a>(
        &'a mut self,
        other: &'a DirtyBitmaps,
    ) -> impl Iterator<Item = (&'a mut PageBitmap, &'a PageBitmap)> {
        assert_eq!(self.0.len(), other.0.len(), "only bitmaps of the same guest can be merged");
        self.0.iter_mut().zip(&other.0)
    }
}
