//! All blocks of a guest.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::custody::Slot;
use crate::{RamBlock, RamError};

/// The RAM of one guest: blocks in the order in which the migration stream lists them. Cloning shares it.
#[derive(Debug, Clone)]
pub struct GuestRam {
    blocks: Arc<[RamBlock]>,
    is_tracked: Arc<AtomicBool>,
    pub(crate) custody: Arc<Slot>,
}

/// The right to track the writes of a guest, which only one may have: whoever harvests takes bits that
/// another would miss. Given back when dropped.
#[derive(Debug)]
pub struct TrackingClaim {
    is_tracked: Arc<AtomicBool>,
}

impl Drop for TrackingClaim {
    fn drop(&mut self) {
        self.is_tracked.store(false, Ordering::Release);
    }
}

impl GuestRam {
    /// Puts blocks together.
    ///
    /// # Errors
    /// [`RamError::DuplicateName`].
    pub fn new(blocks: Vec<RamBlock>) -> Result<Self, RamError> {
        let mut names = HashSet::new();
        for block in &blocks {
            if !names.insert(block.name()) {
                return Err(RamError::DuplicateName { name: block.name().to_owned() });
            }
        }
        Ok(GuestRam { blocks: blocks.into(), is_tracked: Arc::default(), custody: Arc::default() })
    }

    /// The right to track this guest's writes; `None` while somebody has it.
    pub fn claim_tracking(&self) -> Option<TrackingClaim> {
        let free = !self.is_tracked.swap(true, Ordering::AcqRel);
        free.then(|| TrackingClaim { is_tracked: Arc::clone(&self.is_tracked) })
    }

    /// The blocks.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// One block.
    ///
    /// # Panics
    /// If there is no block `index`; indices come from [`GuestRam::index_of`] or from a loop.
    pub fn block(&self, index: usize) -> &RamBlock {
        &self.blocks[index]
    }

    /// Where the block of this name is in the list.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name() == name)
    }

    /// Sum of the blocks' lengths.
    pub fn total_bytes(&self) -> u64 {
        self.blocks.iter().map(RamBlock::len_bytes).sum()
    }

    /// Sum of the blocks' pages.
    pub fn total_pages(&self) -> u64 {
        self.blocks.iter().map(RamBlock::pages).sum()
    }

    /// Whether both are the same memory (clones of one another).
    pub fn same_as(&self, other: &GuestRam) -> bool {
        Arc::ptr_eq(&self.blocks, &other.blocks)
    }
}
