//! A checked window onto live guest RAM.

use std::marker::PhantomData;

use crate::guard::{self, RamFault};
use crate::zero;

/// A window onto guest RAM: a pointer and a length that were checked against a block which lives for
/// `'a`. The bytes may change at any time, so they are only ever copied, scanned, or given to the
/// kernel; there is no way to a `&[u8]`.
#[derive(Debug, Clone, Copy)]
pub struct RamSlice<'a> {
    pointer: *mut u8,
    len: usize,
    block: PhantomData<&'a ()>,
}

// SAFETY: the window names memory of the process (not of a thread) that lives for 'a, and every access
// is volatile, by an opaque instruction, or the kernel's.
unsafe impl Send for RamSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for RamSlice<'_> {}

impl<'a> RamSlice<'a> {
    /// A window onto memory that is not a [`crate::RamBlock`]'s.
    ///
    /// # Safety
    /// `[pointer, pointer + len)` must be mapped readable and writable for all of `'a`, and no Rust
    /// reference to any of it may exist meanwhile.
    pub unsafe fn from_raw(pointer: *mut u8, len: usize) -> Self {
        RamSlice { pointer, len, block: PhantomData }
    }

    /// Where the window begins; for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part from `from` on, `len` bytes; `None` if that is not inside the window.
    pub fn part(&self, from: usize, len: usize) -> Option<RamSlice<'a>> {
        (from.checked_add(len)? <= self.len).then(|| RamSlice {
            pointer: self.pointer.wrapping_add(from),
            len,
            block: PhantomData,
        })
    }

    /// Whether every byte is zero, by the best instructions this machine has. Reading a hole of a
    /// memfd populates it: see [`crate::RamBlock::mark_absent`].
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed.
    pub fn is_zero(&self) -> Result<bool, RamFault> {
        zero::Method::best().is_zero(*self)
    }

    /// Scans the window's whole pages: bit `i % 64` of `bits[i / 64]` tells whether page `i` is zero.
    /// Gives the number of zero pages. Pages for which `bits` has no room are not scanned.
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed.
    pub fn zero_page_bits(&self, bits: &mut [u64]) -> Result<u64, RamFault> {
        zero::Method::best().zero_page_bits(*self, bits)
    }

    /// Copies the window out.
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed; the bytes before it are copied.
    ///
    /// # Panics
    /// If the lengths differ, or memory of `to` has failed.
    pub fn copy_to(&self, to: &mut [u8]) -> Result<(), RamFault> {
        assert_eq!(self.len, to.len(), "a window of RAM is copied whole");
        // SAFETY: both ranges are valid for `len` bytes; `to` is a unique borrow of memory that is not
        // guest RAM (no reference to that exists), so they do not overlap.
        unsafe { guard::copy(self.pointer, to.as_mut_ptr(), self.len) }.inspect_err(|fault| self.has(*fault))
    }

    /// Copies bytes into the window.
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed; the bytes before it are written.
    ///
    /// # Panics
    /// If the lengths differ, or memory of `from` has failed.
    pub fn copy_from(&self, from: &[u8]) -> Result<(), RamFault> {
        assert_eq!(self.len, from.len(), "a window of RAM is filled whole");
        // SAFETY: as in `copy_to`, the other way round.
        unsafe { guard::copy(from.as_ptr(), self.pointer, self.len) }.inspect_err(|fault| self.has(*fault))
    }

    /// Stores zeros over the whole window.
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed; the bytes before it are zero.
    pub fn fill_zero(&self) -> Result<(), RamFault> {
        // SAFETY: the window is mapped.
        unsafe { guard::fill_zero(self.pointer, self.len) }
    }

    /// The other side of a copy is memory of this process, which it cannot do without.
    fn has(&self, fault: RamFault) {
        let start = self.pointer as usize;
        // A fault may be told by its page.
        let range = (start & !(crate::PAGE_SIZE - 1))..start + self.len;
        assert!(range.contains(&fault.address), "memory of this process that is no guest's: {fault}");
    }
}
