//! All blocks of a guest.

use std::collections::HashSet;
use std::sync::Arc;

use crate::{RamBlock, RamError};

/// The RAM of one guest: blocks in the order in which the migration stream lists them. Cloning shares it.
#[derive(Debug, Clone)]
pub struct GuestRam {
    blocks: Arc<[RamBlock]>,
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
        Ok(GuestRam { blocks: blocks.into() })
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
