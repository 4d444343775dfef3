//! The RAM of a guest: its blocks, with a common tracking claim and custody.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::block::RamBlock;
use crate::custody::Custody;
use crate::custody::Slot;
use crate::error::RamError;
use crate::mapping::Mapping;

/// The RAM of one guest: its blocks, in the order of the migration stream. Cloning shares the memory.
///
/// The list of blocks never changes. When memory is plugged or unplugged, [`GuestRam::with_blocks`] makes the
/// guest's next RAM.
#[derive(Debug, Clone)]
pub struct GuestRam {
    blocks: Arc<[RamBlock]>,
    is_tracked: Arc<AtomicBool>,
    pub(crate) custody: Arc<Slot>,
    /// Number of RAMs that the guest had before this one.
    pub(crate) generation: u64,
}

/// The reason why a guest's memory cannot be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// A migration involves the guest.
    #[error(
        "memory cannot be plugged or unplugged while a migration involves the guest (it is {0:?}): wait until \
         the migration has ended, or cancel it"
    )]
    Migrating(Custody),
    /// The guest's writes are tracked.
    #[error(
        "memory cannot be plugged or unplugged while the guest's writes are tracked (a dirty rate is measured)"
    )]
    Tracked,
    /// The new list of blocks is invalid.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// The exclusive right to track the writes of a guest. Dropping it releases the right.
///
/// Two users cannot track at the same time, because a sync clears bits that the other one would miss.
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
    /// Makes the RAM of a new guest from its blocks.
    ///
    /// # Errors
    /// [`RamError::DuplicateName`].
    pub fn new(blocks: Vec<RamBlock>) -> Result<Self, RamError> {
        check_names(&blocks)?;
        link(&blocks);
        Ok(GuestRam {
            blocks: blocks.into(),
            is_tracked: Arc::default(),
            custody: Arc::default(),
            generation: 0,
        })
    }

    /// Makes the RAM of the same guest after memory was plugged or unplugged.
    ///
    /// `blocks` is the complete new list. Custody of the guest moves to the new RAM. This RAM and its clones
    /// become [`Custody::Replaced`], and no migration can start with them. The VMM must use the new RAM for
    /// later calls and for its dirty source.
    ///
    /// ```
    /// use sterna_ram::{Backing, Custody, GuestRam, RamBlock};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let before = GuestRam::new(vec![RamBlock::new("ram", 1 << 20, Backing::Memfd)?])?;
    /// let plugged = RamBlock::new("dimm0", 1 << 20, Backing::Memfd)?.at_guest_address(4 << 30);
    ///
    /// let now = before.with_blocks(before.blocks().iter().cloned().chain([plugged]).collect())?;
    ///
    /// assert_eq!(now.total_bytes(), 2 << 20);
    /// assert_eq!((before.custody(), now.custody()), (Custody::Replaced, Custody::Free));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ChangeError`]; nothing has changed then.
    pub fn with_blocks(&self, blocks: Vec<RamBlock>) -> Result<Self, ChangeError> {
        check_names(&blocks)?;
        // The claim prevents another thread from starting to track meanwhile.
        let _tracking = self.claim_tracking().ok_or(ChangeError::Tracked)?;
        let generation = self.next_generation().map_err(ChangeError::Migrating)?;
        link(&blocks);
        Ok(GuestRam {
            blocks: blocks.into(),
            is_tracked: Arc::clone(&self.is_tracked),
            custody: Arc::clone(&self.custody),
            generation,
        })
    }

    /// Claims the right to track this guest's writes; `None` while another user has it.
    pub fn claim_tracking(&self) -> Option<TrackingClaim> {
        let free = !self.is_tracked.swap(true, Ordering::AcqRel);
        free.then(|| TrackingClaim { is_tracked: Arc::clone(&self.is_tracked) })
    }

    /// Returns all blocks, in the order of the migration stream.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Returns the block at `index`.
    ///
    /// # Panics
    /// If there is no block `index`; indices come from [`GuestRam::index_of`] or from a loop.
    pub fn block(&self, index: usize) -> &RamBlock {
        &self.blocks[index]
    }

    /// Returns the index of the block with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name() == name)
    }

    /// Whether pages of a block may still arrive from a server of this process.
    pub fn is_filling(&self) -> bool {
        self.blocks().iter().any(RamBlock::is_filling)
    }

    /// Returns the sum of the blocks' lengths, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.blocks.iter().map(RamBlock::len_bytes).sum()
    }

    /// Returns the sum of the blocks' pages of [`PAGE_SIZE`](crate::PAGE_SIZE).
    pub fn total_pages(&self) -> u64 {
        self.blocks.iter().map(RamBlock::pages).sum()
    }

    /// Whether both are clones of the same RAM. `false` if [`GuestRam::with_blocks`] made one from the other.
    pub fn same_as(&self, other: &GuestRam) -> bool {
        Arc::ptr_eq(&self.blocks, &other.blocks)
    }
}

fn link(blocks: &[RamBlock]) {
    let mappings: Vec<_> = blocks.iter().map(|block| Arc::clone(&block.mapping)).collect();
    Mapping::link(&mappings);
}

fn check_names(blocks: &[RamBlock]) -> Result<(), RamError> {
    let mut names = HashSet::new();
    match blocks.iter().find(|block| !names.insert(block.name())) {
        Some(block) => Err(RamError::DuplicateName { name: block.name().to_owned() }),
        None => Ok(()),
    }
}
