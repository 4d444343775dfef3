//! Memory that an adapter reads and writes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use sterna_ram::{Backing, PAGE_SIZE, PinnedRam, RamBlock, RamError, RamSlice};

/// A range of this process's memory, and what keeps it mapped. The guest may write it at any time.
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

// SAFETY: it names memory of the process (not of a thread), which the owner keeps mapped, and every access is through a
// `RamSlice` or the adapter's. The owner itself may be sent.
unsafe impl Send for Memory {}
// SAFETY: as above; the owner may be shared.
unsafe impl Sync for Memory {}

impl Memory {
    /// A part of a block of guest RAM.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`]; [`RamError::Poisoned`] if a page of it is known to have failed.
    pub fn of_block(block: &RamBlock, offset: u64, len: usize) -> Result<Self, RamError> {
        let start = block.slice(offset, len)?.as_ptr();
        Ok(Self { start, len, owner: Owner::Block { block: block.clone(), offset } })
    }

    /// Memory of its own, all zero, at least `len` bytes, on whole pages: for messages.
    ///
    /// # Errors
    /// [`RamError::Length`] for no bytes, [`RamError::System`] (no memory).
    pub fn anonymous(len: usize) -> Result<Self, RamError> {
        let len = len.next_multiple_of(PAGE_SIZE);
        let block = RamBlock::new("rdma-buffers", len as u64, Backing::Anonymous)?;
        Self::of_block(&block, 0, len)
    }

    /// Memory that is not a [`RamBlock`]'s.
    ///
    /// # Safety
    /// As long as `owner` lives, `[start, start + len)` must be mapped, readable, and writable if it is registered for
    /// writing; and no Rust reference to any of it may exist.
    pub unsafe fn from_raw(start: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner: Owner::Other(owner) }
    }

    /// Its address in this process: what a peer writes to.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it as a window.
    pub fn slice(&self) -> RamSlice<'_> {
        // SAFETY: the owner, which lives as long as `self`, keeps the range mapped, and there is no Rust reference to it:
        // a block gives none, and the caller of `from_raw` promised both.
        unsafe { RamSlice::from_raw(self.start, self.len) }
    }

    /// The block that it is a part of, and where in it: `None` for memory that is not a block's.
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
            // What owns it is nobody's business here; that somebody does is.
            Owner::Other(owner) => out.field("owners", &Arc::strong_count(owner)),
        };
        out.finish()
    }
}

/// What may be done to registered memory. Sending and writing *from* it is always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Access {
    /// Receives may be stored there.
    pub local_write: bool,
    /// The peer may write there. Needs `local_write`.
    pub remote_write: bool,
    /// Do not pin pages; the adapter faults them in. Only where [`super::AdapterInfo::on_demand_paging`] says so.
    pub on_demand: bool,
}

impl Access {
    /// To send and write from.
    pub const SOURCE: Self = Self { local_write: false, remote_write: false, on_demand: false };
    /// To receive into.
    pub const RECEIVE: Self = Self { local_write: true, ..Self::SOURCE };
    /// For the peer to write to.
    pub const REMOTE_WRITE: Self = Self { remote_write: true, ..Self::RECEIVE };

    /// The same without pinning.
    #[must_use]
    pub const fn on_demand(mut self) -> Self {
        self.on_demand = true;
        self
    }
}

/// Memory that an adapter is about to register: its pages stay in place from now on ([`RamBlock::pin`]).
#[derive(Debug)]
pub struct PinnedMemory {
    memory: Memory,
    access: Access,
    /// `None` for memory that is not a block's, and where the adapter follows the pages.
    _pin: Option<PinnedRam>,
}

impl PinnedMemory {
    /// Keeps the pages of `memory` in place, unless `access` is on demand.
    pub fn new(memory: Memory, access: Access) -> Self {
        let block = memory.block().filter(|_| !access.on_demand);
        // It is inside the block, so nothing refuses it.
        let pin = block.and_then(|(block, offset)| block.pin(offset, memory.len() as u64).ok());
        Self { memory, access, _pin: pin }
    }

    /// What it is.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Registered memory. Dropping it deregisters it; the memory lives at least until then, and its pages stay in place.
pub struct Registration {
    /// Deregisters when it is dropped, which must be before `pinned` is.
    _handle: Box<dyn Any + Send + Sync>,
    pinned: PinnedMemory,
    lkey: u32,
    rkey: u32,
}

impl Registration {
    /// What an adapter makes of memory that was pinned before it was registered; `handle` deregisters when it is dropped.
    pub fn new(pinned: PinnedMemory, (lkey, rkey): (u32, u32), handle: impl Any + Send + Sync) -> Self {
        Self { _handle: Box::new(handle), pinned, lkey, rkey }
    }

    /// What is registered.
    pub fn memory(&self) -> &Memory {
        &self.pinned.memory
    }

    /// What may be done to it.
    pub fn access(&self) -> Access {
        self.pinned.access
    }

    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// `len` bytes from `offset` on, for a work request; `None` if they are not inside.
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

/// A piece of registered memory of this side, for a work request. The adapter checks it against the registration: one
/// that is wrong, or whose registration is gone, fails the request and touches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The first byte's address in this process.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// The registration's local key.
    pub lkey: u32,
}

impl Piece {
    /// No bytes.
    pub const EMPTY: Self = Self { address: 0, len: 0, lkey: 0 };
}
