//! A checked window onto live guest RAM.

use std::marker::PhantomData;
use std::ptr;

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
    pub fn is_zero(&self) -> bool {
        zero::Method::best().is_zero(*self)
    }

    /// Scans the window's whole pages: bit `i % 64` of `bits[i / 64]` tells whether page `i` is zero.
    /// Gives the number of zero pages. Pages for which `bits` has no room are not scanned.
    pub fn zero_page_bits(&self, bits: &mut [u64]) -> u64 {
        zero::Method::best().zero_page_bits(*self, bits)
    }

    /// Copies the window out.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(self.len, to.len(), "a window of RAM is copied whole");
        // SAFETY: both ranges are valid for `len` bytes; `to` is a unique borrow of memory that is not
        // guest RAM (no reference to that exists), so they do not overlap.
        unsafe { copy(self.pointer, to.as_mut_ptr(), self.len) }
    }

    /// Copies bytes into the window.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(&self, from: &[u8]) {
        assert_eq!(self.len, from.len(), "a window of RAM is filled whole");
        // SAFETY: as in `copy_to`, the other way round.
        unsafe { copy(from.as_ptr(), self.pointer, self.len) }
    }

    /// Stores zeros over the whole window.
    pub fn fill_zero(&self) {
        let (head, words) = split(self.pointer, self.len);
        for index in (0..head).chain(head + words * 8..self.len) {
            // SAFETY: `index` is inside the window.
            unsafe { ptr::write_volatile(self.pointer.add(index), 0) };
        }
        for index in 0..words {
            // SAFETY: inside the window and aligned to 8, by `split`.
            unsafe { ptr::write_volatile(self.pointer.add(head).cast::<u64>().add(index), 0) };
        }
    }
}

/// Bytes before the first aligned word, and the number of whole words after them.
fn split(pointer: *const u8, len: usize) -> (usize, usize) {
    let head = pointer.align_offset(8).min(len);
    (head, (len - head) / 8)
}

/// Copies between guest RAM and memory of ours.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the instruction reads and writes exactly the two ranges, which the caller vouches for;
    // the direction flag is clear by the calling convention. Being opaque to the compiler, it makes no
    // assumption that the guest's concurrent writes could break.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies between guest RAM and memory of ours.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    for index in 0..len {
        // SAFETY: inside both ranges.
        unsafe { ptr::write_volatile(to.add(index), ptr::read_volatile(from.add(index))) };
    }
}
