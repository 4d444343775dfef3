//! Pins pages that an adapter has registered and uses by their physical address.

use std::sync::Arc;

use crate::bitmap::Run;
use crate::block::RamBlock;
use crate::error::RamError;
use crate::mapping::Mapping;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};

/// A part of a block whose pages the engine does not give back meanwhile.
///
/// The pin ends when the value is dropped. If a pinned page must become zero, zeros are stored.
///
/// An adapter continues to use the pages that it found at their registration. If a page were given back, the
/// block would get a new page, and the adapter's writes to the old one would be lost.
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
    /// Pins the pages of `[offset, offset + len)` while the result lives.
    ///
    /// Call it before the pages are registered. It does not prevent the block's owner from giving them back.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn pin(&self, offset: u64, len: u64) -> Result<PinnedRam, RamError> {
        self.check(offset, len)?;
        let key = self.mapping.pins.lock().add(offset..offset + len);
        Ok(PinnedRam { mapping: self.mapping.clone(), key })
    }

    /// Returns the first [pinned](RamBlock::pin) pages of `[first, first + count)`.
    ///
    /// The run ends where the pin of its first page ends.
    pub fn pinned_in(&self, first: u64, count: u64) -> Option<Run> {
        let pages = first * PAGE_BYTES..(first + count) * PAGE_BYTES;
        let pinned = self.mapping.pins.lock().first_in(pages)?;
        let first = pinned.start >> PAGE_SHIFT;
        Some(Run { first, count: pinned.end.div_ceil(PAGE_BYTES) - first })
    }
}
