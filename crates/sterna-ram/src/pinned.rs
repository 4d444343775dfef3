//! Pages that somebody uses by their place in physical memory: an adapter that has registered them.

use std::sync::Arc;

use crate::mapping::Mapping;
use crate::{PAGE_BYTES, PAGE_SHIFT, RamBlock, RamError, Run};

/// A part of a block whose pages stay while this lives: the engine gives none of them back to the kernel. Where a page is
/// to be zero, zeros are stored.
///
/// An adapter goes on using the pages that it found when they were registered. If one was given back, the block would
/// have another page there, and what the adapter writes would be lost.
#[derive(Debug)]
pub struct PinnedRam {
    mapping: Arc<Mapping>,
    key: (u64, u64),
}

impl Drop for PinnedRam {
    fn drop(&mut self) {
        self.mapping.pins.lock().remove(self.key);
    }
}

impl RamBlock {
    /// Keeps the pages of `[offset, offset + len)` in place for as long as the result lives. Call it before the pages are
    /// registered. The block's owner is not kept from giving them back.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn pin(&self, offset: u64, len: u64) -> Result<PinnedRam, RamError> {
        self.check(offset, len)?;
        let key = self.mapping.pins.lock().add(offset..offset + len);
        Ok(PinnedRam { mapping: self.mapping.clone(), key })
    }

    /// The first of the pages `[first, first + count)` that are [pinned](RamBlock::pin), and those that follow it and are
    /// covered by the same pin.
    pub fn pinned_in(&self, first: u64, count: u64) -> Option<Run> {
        let pages = first * PAGE_BYTES..(first + count) * PAGE_BYTES;
        let pinned = self.mapping.pins.lock().first_in(pages)?;
        let first = pinned.start >> PAGE_SHIFT;
        Some(Run { first, count: pinned.end.div_ceil(PAGE_BYTES) - first })
    }
}
