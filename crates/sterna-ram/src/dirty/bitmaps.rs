//! The bitmaps of a whole guest.

use crate::{GuestRam, PageBitmap};

/// One [`PageBitmap`] for each block of a guest.
#[derive(Debug)]
pub struct DirtyBitmaps(Vec<PageBitmap>);

impl DirtyBitmaps {
    /// Bitmaps for every block, all clear.
    pub fn new(ram: &GuestRam) -> Self {
        DirtyBitmaps(ram.blocks().iter().map(|block| PageBitmap::new(block.pages())).collect())
    }

    /// The bitmap of one block.
    ///
    /// # Panics
    /// If there is no block `index`.
    pub fn block(&self, index: usize) -> &PageBitmap {
        &self.0[index]
    }

    /// The bitmap of one block, to change it without atomic instructions.
    ///
    /// # Panics
    /// If there is no block `index`.
    pub fn block_mut(&mut self, index: usize) -> &mut PageBitmap {
        &mut self.0[index]
    }

    /// All of them, in the order of the blocks.
    pub fn blocks(&self) -> &[PageBitmap] {
        &self.0
    }

    /// How many bits are set in all.
    pub fn count(&self) -> u64 {
        self.0.iter().map(PageBitmap::count).sum()
    }

    /// Clears every bit, while no one else changes any (see [`PageBitmap::clear_all`]).
    pub fn clear_all(&self) {
        self.0.iter().for_each(PageBitmap::clear_all);
    }

    /// Sets every page's bit, while no one else changes any (see [`PageBitmap::set_all`]).
    pub fn set_all(&self) {
        self.0.iter().for_each(PageBitmap::set_all);
    }

    /// ORs others in; gives how many bits were clear before.
    ///
    /// # Panics
    /// If the two are not of the same RAM.
    pub fn or_from(&mut self, other: &DirtyBitmaps) -> u64 {
        self.pairs(other).map(|(to, from)| to.or_from(from)).sum()
    }

    /// Drops reports that came too early: clears here every bit that is still set in `sent`, the round that
    /// is being sent (see [`crate::dirty`]). `sent` may lose bits meanwhile; one that goes after it was
    /// looked at makes no difference, as its page is read after that. Gives how many were dropped.
    ///
    /// # Panics
    /// If the two are not of the same RAM.
    pub fn drop_reported(&mut self, sent: &DirtyBitmaps) -> u64 {
        self.pairs(sent).map(|(to, sent)| to.drop_reported(sent)).sum()
    }

    fn pairs<'a>(
        &'a mut self,
        other: &'a DirtyBitmaps,
    ) -> impl Iterator<Item = (&'a mut PageBitmap, &'a PageBitmap)> {
        assert_eq!(self.0.len(), other.0.len(), "only bitmaps of one guest go together");
        self.0.iter_mut().zip(&other.0)
    }
}
