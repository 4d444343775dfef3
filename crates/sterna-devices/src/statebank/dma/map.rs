//! A region of guest RAM that is mapped into this process.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::vfio_user::DmaRegion;
use crate::vfio_user::wire::{DMA_READ, DMA_WRITE};

pub(in crate::statebank) const PAGE_BYTES: u64 = 4096;

/// A mapping of a client's file. The client and its guest write the file at the same time. Therefore this
/// process only makes atomic accesses of whole words.
///
/// If the client shrinks its file, an access ends this process. A device trusts its VMM in this respect.
#[derive(Debug)]
pub(super) struct Map {
    first: u64,
    bytes: u64,
    writable: bool,
    pointer: *mut u8,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only touched atomically.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps a region. EINVAL if its file is too short.
    pub(super) fn new(region: &DmaRegion) -> Result<Self, Errno> {
        let file = rustix::fs::fstat(&region.file)?;
        let end = region.map.offset.checked_add(region.map.size).ok_or(Errno::INVAL)?;
        if u64::try_from(file.st_size).map_err(|_| Errno::INVAL)? < end {
            return Err(Errno::INVAL);
        }
        let (readable, writable) = (region.map.flags & DMA_READ != 0, region.map.flags & DMA_WRITE != 0);
        let mut access = ProtFlags::empty();
        access.set(ProtFlags::READ, readable || writable);
        access.set(ProtFlags::WRITE, writable);
        let len = usize::try_from(region.map.size).map_err(|_| Errno::INVAL)?;
        let (file, offset) = (&region.file, region.map.offset);
        // SAFETY: the kernel chooses a free address, so no other mapping is replaced. The file reaches to the
        // region's end (checked above). The other side writes the file too, so its content is only accessed
        // as atomics.
        let pointer = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, offset) }?;
        let (first, bytes) = (region.map.address, region.map.size);
        Ok(Self { first, bytes, writable, pointer: pointer.cast() })
    }

    pub(super) fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }

    pub(super) fn overlaps(&self, first: u64, bytes: u64) -> bool {
        first < self.first.saturating_add(self.bytes) && self.first < first.saturating_add(bytes)
    }

    /// Writes a counter and its tag into the page at `address`. The page must be in this region.
    pub(super) fn write(&self, address: u64, counter: u64, tag: u64) {
        self.word(address, 0).store(counter, Ordering::Relaxed);
        self.word(address, 8).store(tag, Ordering::Relaxed);
        self.word(address, PAGE_BYTES - 8).store(tag, Ordering::Relaxed);
    }

    /// The counter in the page at `address`, or 0 if its tags are wrong.
    pub(super) fn written(&self, address: u64, tag: impl Fn(u64) -> u64) -> u64 {
        let counter = self.word(address, 0).load(Ordering::Relaxed);
        let tag = tag(counter);
        let fits = |offset| self.word(address, offset).load(Ordering::Relaxed) == tag;
        if counter != 0 && fits(8) && fits(PAGE_BYTES - 8) { counter } else { 0 }
    }

    fn word(&self, address: u64, offset: u64) -> &AtomicU64 {
        let at = address - self.first + offset;
        assert!(self.writable && at.is_multiple_of(8) && at + 8 <= self.bytes);
        // SAFETY: the address is inside the mapping, which is writable, and aligned (both asserted; mappings
        // begin with a page). The mapping lives as long as `self`. All accesses of this process are atomic.
        // Other accesses are made outside of Rust.
        unsafe { AtomicU64::from_ptr(self.pointer.add(at as usize).cast()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: we own exactly this mapping, and references into it borrow `self`.
        let unmapped = unsafe { munmap(self.pointer.cast(), self.bytes as usize) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "guest RAM could not be unmapped");
        }
    }
}
