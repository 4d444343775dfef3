//! All blocks of a guest.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::custody::Slot;
use crate::mapping::Mapping;
use crate::{Custody, RamBlock, RamError};

/// The RAM of one guest: blocks in the order in which the migration stream lists them. Cloning shares it.
///
/// The blocks never change. When memory is plugged or unplugged, [`GuestRam::with_blocks`] makes the RAM that the guest
/// has from then on.
#[derive(Debug, Clone)]
pub struct GuestRam {
    blocks: Arc<[RamBlock]>,
    is_tracked: Arc<AtomicBool>,
    pub(crate) custody: Arc<Slot>,
    /// How many RAMs the guest had before this one.
    pub(crate) generation: u64,
}

/// Why a guest's memory cannot be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// A migration has to do with the guest.
    #[error(
        "memory cannot be plugged or unplugged while a migration involves the guest (it is {0:?}): wait until \
         the migration has ended, or cancel it"
    )]
    Migrating(Custody),
    /// Its writes are being tracked.
    #[error(
        "memory cannot be plugged or unplugged while the guest's writes are tracked (a dirty rate is measured)"
    )]
    Tracked,
    /// The new list of blocks is not possible.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// The right to track the writes of a guest, which only one may have: a sync takes bits that
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
        check_names(&blocks)?;
        link(&blocks);
        Ok(GuestRam {
            blocks: blocks.into(),
            is_tracked: Arc::default(),
            custody: Arc::default(),
            generation: 0,
        })
    }

    /// The RAM of the same guest after memory was plugged or unplugged: `blocks` are all that it has now. Custody of
    /// the guest goes over to it; this one and its clones are [`Custody::Replaced`], and no migration begins with
    /// them. From then on the VMM gives the new RAM to whoever asks, and makes its dirty source over it.
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
        // Nobody begins to track in between.
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

    /// Whether both are the same memory (clones of one another). False once [`GuestRam::with_blocks`] came between.
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
