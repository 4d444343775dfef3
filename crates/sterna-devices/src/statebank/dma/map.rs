//! A region of guest RAM in this process.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::vfio_user::DmaRegion;
use crate::vfio_user::wire::{DMA_READ, DMA_WRITE};

pub(in crate::statebank) const PAGE_BYTES: u64 = 4096;

/// A mapping of a client's file. The client and its guest write it at the same time, so it is only ever touched by
/// atomic accesses of whole words.
///
/// A client that shrinks its file makes touching it fatal for this process. A device trusts its VMM so far.
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
    /// Maps a region; EINVAL if its file is too short.
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
        // SAFETY: the kernel chooses a free address, so no one else's mapping is replaced. The file reaches to the
        // region's end (checked above), and it is the other side's: what is in it is only read and written as atomics.
        let pointer =
            unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &region.file, region.map.offset) }?;
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

    /// Writes a counter and its tag into the page at `address`, which must be one of this region's.
    pub(super) fn write(&self, address: u64, counter: u64, tag: u64) {
        self.word(address, 0).store(counter, Ordering::Relaxed);
        self.word(address, 8).store(tag, Ordering::Relaxed);
        self.word(address, PAGE_BYTES - 8).store(tag, Ordering::Relaxed);
    }

    /// The counter that was written into that page, if its tags are right; else 0.
    pub(super) fn written(&self, address: u64, tag: impl Fn(u64) -> u64) -> u64 {
        let counter = self.word(address, 0).load(Ordering::Relaxed);
        let tag = tag(counter);
        let fits = |offset| self.word(address, offset).load(Ordering::Relaxed) == tag;
        if counter != 0 && fits(8) && fits(PAGE_BYTES - 8) { counter } else { 0 }
    }

    fn word(&self, address: u64, offset: u64) -> &AtomicU64 {
        let at = address - self.first + offset;
        assert!(self.writable && at.is_multiple_of(8) && at + 8 <= self.bytes);
        // SAFETY: inside the mapping, which is writable, and aligned (both asserted; mappings begin with a page);
        // alive while `self` is. All of this process's accesses are atomic; others are not Rust's.
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
