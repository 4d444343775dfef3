//! Checked windows onto live guest RAM, by which its bytes are copied, scanned and cleared.

use std::marker::PhantomData;

use crate::guard::{self, RamFault};
use crate::page::PAGE_SIZE;

/// A window onto guest RAM: a pointer and a length, checked against a block.
///
/// The block lives for `'a`. The bytes may change at any time. They are therefore only copied, scanned, or
/// passed to the kernel. No method returns a `&[u8]`.
#[derive(Debug, Clone, Copy)]
pub struct RamSlice<'a> {
    pointer: *mut u8,
    len: usize,
    block: PhantomData<&'a ()>,
}

// SAFETY: the window names memory of the process (not of a thread) that lives for 'a. Every access is volatile,
// by an opaque instruction, or by the kernel.
unsafe impl Send for RamSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for RamSlice<'_> {}

impl<'a> RamSlice<'a> {
    /// Makes a window onto memory that does not belong to a [`crate::RamBlock`].
    ///
    /// # Safety
    /// `[pointer, pointer + len)` must be mapped readable and writable during `'a`, and no Rust reference to
    /// any of its bytes may exist meanwhile.
    pub unsafe fn from_raw(pointer: *mut u8, len: usize) -> Self {
        RamSlice { pointer, len, block: PhantomData }
    }

    /// Returns the address of the first byte, for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` bytes from byte `from` on; `None` if they are not inside the window.
    pub fn part(&self, from: usize, len: usize) -> Option<RamSlice<'a>> {
        (from.checked_add(len)? <= self.len).then(|| RamSlice {
            pointer: self.pointer.wrapping_add(from),
            len,
            block: PhantomData,
        })
    }

    /// Copies the window into `to`.
    ///
    /// # Errors
    /// [`RamFault`] if a page of the window has failed; the bytes before it are copied.
    ///
    /// # Panics
    /// If the lengths differ, or if memory of `to` has failed, because this process cannot continue without it.
    pub fn copy_to(&self, to: &mut [u8]) -> Result<(), RamFault> {
        assert_eq!(self.len, to.len(), "a window of RAM is copied whole");
        // SAFETY: both ranges are valid for `len` bytes. `to` is a unique borrow, and no reference to guest RAM
        // exists, so the ranges do not overlap.
        let copied = unsafe { guard::copy(self.pointer, to.as_mut_ptr(), self.len) };
        copied.inspect_err(|fault| assert_not_in(to, *fault))
    }

    /// Copies `from` into the window.
    ///
    /// # Errors
    /// [`RamFault`] if a page of the window has failed; the bytes before it are written.
    ///
    /// # Panics
    /// If the lengths differ, or if memory of `from` has failed, because this process cannot continue without
    /// it.
    pub fn copy_from(&self, from: &[u8]) -> Result<(), RamFault> {
        assert_eq!(self.len, from.len(), "a window of RAM is filled whole");
        // SAFETY: as in `copy_to`, in the other direction.
        let copied = unsafe { guard::copy(from.as_ptr(), self.pointer, self.len) };
        copied.inspect_err(|fault| assert_not_in(from, *fault))
    }

    /// Copies the window into another one, also of another block. The windows must not overlap.
    ///
    /// # Errors
    /// [`RamFault`] if a page of either has failed; the bytes before it are copied.
    ///
    /// # Panics
    /// If the lengths differ, or the windows overlap.
    pub fn copy_to_window(&self, to: &RamSlice<'_>) -> Result<(), RamFault> {
        assert_eq!(self.len, to.len, "a window of RAM is copied whole");
        let (from, into) = (self.pointer as usize, to.pointer as usize);
        assert!(from.abs_diff(into) >= self.len, "windows of RAM that overlap are not copied");
        // SAFETY: both windows are mapped for `len` bytes, and they do not overlap.
        unsafe { guard::copy(self.pointer, to.pointer, self.len) }
    }

    /// Stores zeros over the whole window.
    ///
    /// # Errors
    /// [`RamFault`] if one of its pages has failed; the bytes before it are zero.
    pub fn fill_zero(&self) -> Result<(), RamFault> {
        // SAFETY: the window is mapped.
        unsafe { guard::fill_zero(self.pointer, self.len) }
    }
}

/// Panics if the fault is in `own`, the buffer of a copy.
///
/// This process cannot continue without that memory.
///
/// Every other fault belongs to guest RAM, even if its address is outside of the window. The kernel may report
/// the touched page, or the first byte of the huge page around it.
fn assert_not_in(own: &[u8], fault: RamFault) {
    let start = own.as_ptr() as usize;
    let pages = start / PAGE_SIZE * PAGE_SIZE..(start + own.len()).next_multiple_of(PAGE_SIZE);
    assert!(!pages.contains(&fault.address), "memory of this process that is no guest's: {fault}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_is_copied_into_another_one() {
        let mut bytes = vec![0u8; 4 * PAGE_SIZE];
        bytes[..PAGE_SIZE].fill(7);
        let start = bytes.as_mut_ptr();
        let window = |page: usize| {
            // SAFETY: both windows are in `bytes`, which outlives them and is not used meanwhile.
            unsafe { RamSlice::from_raw(start.add(page * PAGE_SIZE), PAGE_SIZE) }
        };
        let [from, to] = [0, 2].map(window);
        from.copy_to_window(&to).unwrap();
        assert_eq!(bytes[2 * PAGE_SIZE..3 * PAGE_SIZE], [7; PAGE_SIZE]);
        assert_eq!(bytes[3 * PAGE_SIZE..], [0; PAGE_SIZE]);
    }

    #[test]
    fn fault_is_the_guests_unless_it_lies_in_a_page_of_the_other_side() {
        let own = vec![0; 100];
        let page = own.as_ptr() as usize / PAGE_SIZE * PAGE_SIZE;
        let is_the_guests =
            |address| std::panic::catch_unwind(|| assert_not_in(&own, RamFault { address })).is_ok();

        assert!(!is_the_guests(own.as_ptr() as usize + 50));
        assert!(!is_the_guests(page), "told by its page");
        assert!(is_the_guests(page - 1));
    }
}
