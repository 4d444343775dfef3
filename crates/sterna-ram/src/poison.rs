//! Records the pages of guest RAM that have failed, so that no code accesses them.

mod find;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The location of a page of guest RAM that has failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoisonedPage {
    /// Name of the page's block.
    pub block: String,
    /// Offset of its first byte in the block.
    pub offset: u64,
    /// Its guest-physical address, if the VMM stated the block's ([`RamBlock::at_guest_address`](crate::RamBlock::at_guest_address)).
    pub guest_address: Option<u64>,
}

impl fmt::Display for PoisonedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {:#x} of block {:?}", self.offset, self.block)?;
        match self.guest_address {
            Some(address) => write!(f, " (guest address {address:#x})"),
            None => Ok(()),
        }
    }
}

/// The pages of a block that are known to have failed.
#[derive(Debug, Default)]
pub(crate) struct Poison {
    /// Whether there are any. Nearly always there are none, and the check is one load.
    any: AtomicBool,
    pages: Mutex<BTreeSet<u64>>,
}

impl Poison {
    /// Returns the first failed page of `[first, end)`.
    #[inline]
    pub(crate) fn first_in(&self, first: u64, end: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.pages.lock().range(first..end.max(first)).next().copied()
    }

    fn mark(&self, first: u64, count: u64) {
        let mut pages = self.pages.lock();
        pages.extend(first..first + count);
        self.any.store(!pages.is_empty(), Ordering::Release);
    }

    pub(crate) fn clear(&self, first: u64, count: u64) {
        if self.any.load(Ordering::Acquire) {
            let mut pages = self.pages.lock();
            pages.retain(|page| !(first..first + count).contains(page));
            self.any.store(!pages.is_empty(), Ordering::Release);
        }
    }
}
