//! Memory that an adapter reads and writes, its registration, and the rights of the peer.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use sterna_ram::{Backing, PAGE_SIZE, PinnedRam, RamBlock, RamError, RamSlice};

/// A range of this process's memory with the owner that keeps it mapped. The guest may write it at any time.
#[derive(Clone)]
pub struct Memory {
    start: *mut u8,
    len: usize,
    owner: Owner,
}

#[derive(Clone)]
enum Owner {
    Block { block: RamBlock, offset: u64 },
    Other(Arc<dyn Any + Send + Sync>),
}

// SAFETY: the pointer names memory of the process (not of a thread), which the owner keeps mapped. Every access
// goes through a `RamSlice` or the adapter. The owner itself can be sent between threads.
unsafe impl Send for Memory {}
// SAFETY: as above; the owner can be shared between threads.
unsafe impl Sync for Memory {}

impl Memory {
    /// A range of a block of guest RAM.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`]; [`RamError::Poisoned`] if a page in the range is known to have failed.
    pub fn of_block(block: &RamBlock, offset: u64, len: usize) -> Result<Self, RamError> {
        let start = block.slice(offset, len)?.as_ptr();
        Ok(Self { start, len, owner: Owner::Block { block: block.clone(), offset } })
    }

    /// Newly allocated memory for messages: zeroed whole pages, at least `len` bytes.
    ///
    /// # Errors
    /// [`RamError::Length`] if `len` is 0, [`RamError::System`] if there is no memory.
    pub fn anonymous(len: usize) -> Result<Self, RamError> {
        let len = len.next_multiple_of(PAGE_SIZE);
        let block = RamBlock::new("rdma-buffers", len as u64, Backing::Anonymous)?;
        Self::of_block(&block, 0, len)
    }

    /// A range of memory outside of any [`RamBlock`].
    ///
    /// # Safety
    /// While `owner` lives, `[start, start + len)` must be mapped and readable, and writable if it is registered
    /// for writing. No Rust reference to any byte of the range may exist.
    pub unsafe fn from_raw(start: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner: Owner::Other(owner) }
    }

    /// Address of the first byte in this process. A peer uses it as the target of writes.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// Length of the range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A window of the whole range.
    pub fn slice(&self) -> RamSlice<'_> {
        // SAFETY: the owner, which lives as long as `self`, keeps the range mapped, and no Rust reference to it
        // exists: a block gives out none, and the caller of `from_raw` guarantees both.
        unsafe { RamSlice::from_raw(self.start, self.len) }
    }

    /// The block of guest RAM, with the offset of the range in it. `None` for memory outside of a block.
    pub fn block(&self) -> Option<(&RamBlock, u64)> {
        match &self.owner {
            Owner::Block { block, offset } => Some((block, *offset)),
            Owner::Other(_) => None,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Memory");
        out.field("start", &self.start).field("len", &self.len);
        match &self.owner {
            Owner::Block { block, offset } => out.field("block", &block.name()).field("offset", offset),
            // The type of the owner is unknown here, so its reference count is printed.
            Owner::Other(owner) => out.field("owners", &Arc::strong_count(owner)),
        };
        out.finish()
    }
}

/// Permitted operations on registered memory. Sending and writing *from* it is always permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Access {
    /// Whether receives may be stored in the memory.
    pub local_write: bool,
    /// Whether the peer may write to the memory. Needs `local_write`.
    pub remote_write: bool,
    /// Whether the adapter faults pages in instead of pinning them. Needs [`super::AdapterInfo::on_demand_paging`].
    pub on_demand: bool,
}

impl Access {
    /// Access to send and write from the memory.
    pub const SOURCE: Self = Self { local_write: false, remote_write: false, on_demand: false };
    /// Access to receive into the memory.
    pub const RECEIVE: Self = Self { local_write: true, ..Self::SOURCE };
    /// Access that lets the peer write to the memory.
    pub const REMOTE_WRITE: Self = Self { remote_write: true, ..Self::RECEIVE };

    /// Changes the access to on-demand paging, without pinning.
    #[must_use]
    pub const fn on_demand(mut self) -> Self {
        self.on_demand = true;
        self
    }
}

/// Memory that an adapter is about to register. Its pages stay in place while this value lives ([`RamBlock::pin`]).
#[derive(Debug)]
pub struct PinnedMemory {
    memory: Memory,
    access: Access,
    /// `None` for memory outside of a block, and with on-demand paging.
    _pin: Option<PinnedRam>,
}

impl PinnedMemory {
    /// Keeps the pages of `memory` in place, unless `access` uses on-demand paging.
    pub fn new(memory: Memory, access: Access) -> Self {
        let block = memory.block().filter(|_| !access.on_demand);
        // The range is inside the block, so `pin` cannot refuse it.
        let pin = block.and_then(|(block, offset)| block.pin(offset, memory.len() as u64).ok());
        Self { memory, access, _pin: pin }
    }

    /// The pinned memory range.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Registered memory. Dropping it deregisters the memory.
///
/// The memory stays mapped, and its pages in place, at least until then.
pub struct Registration {
    /// Deregisters when it is dropped, which must happen before `pinned` is dropped.
    _handle: Box<dyn Any + Send + Sync>,
    pinned: PinnedMemory,
    lkey: u32,
    rkey: u32,
}

impl Registration {
    /// Combines pinned memory with its keys after the adapter registered it. `handle` deregisters it on drop.
    pub fn new(pinned: PinnedMemory, (lkey, rkey): (u32, u32), handle: impl Any + Send + Sync) -> Self {
        Self { _handle: Box::new(handle), pinned, lkey, rkey }
    }

    /// The registered memory range.
    pub fn memory(&self) -> &Memory {
        &self.pinned.memory
    }

    /// The operations that the registration permits.
    pub fn access(&self) -> Access {
        self.pinned.access
    }

    /// The local key, for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The remote key, for writes of the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The `len` bytes from `offset`, for a work request. `None` if they are outside of the registration.
    pub fn piece(&self, offset: usize, len: u32) -> Option<Piece> {
        (offset.checked_add(len as usize)? <= self.memory().len()).then(|| Piece {
            address: self.memory().address() + offset as u64,
            len,
            lkey: self.lkey,
        })
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { _handle: _, pinned: PinnedMemory { memory, access, _pin: _ }, lkey, rkey } = self;
        let mut out = f.debug_struct("Registration");
        out.field("memory", memory).field("access", access).field("lkey", lkey).field("rkey", rkey).finish()
    }
}

/// A piece of this side's registered memory, for a work request.
///
/// The adapter checks it against the registration. If the piece is wrong, or its registration was dropped, the
/// request fails without touching memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte in this process.
    pub address: u64,
    /// Length of the piece in bytes.
    pub len: u32,
    /// Local key of the registration.
    pub lkey: u32,
}

impl Piece {
    /// The piece without bytes; it needs no registration.
    pub const EMPTY: Self = Self { address: 0, len: 0, lkey: 0 };
}
