//! Unguarded copies and scans, for architectures without assembly routines.

use std::ptr;

use super::{Done, ZERO};

/// Returns `false`: copies and scans are not guarded here, so no signal belongs to them.
///
/// # Safety
/// There is no requirement. The function is `unsafe` to match the other architectures.
pub unsafe fn handle_sigbus(_: *const libc::siginfo_t, _: *mut libc::c_void) -> bool {
    false
}

pub(super) unsafe fn sterna_ram_copy(to: *mut u8, from: *const u8, len: usize) -> Done {
    for index in 0..len {
        // SAFETY: inside both ranges.
        unsafe { ptr::write_volatile(to.add(index), ptr::read_volatile(from.add(index))) };
    }
    Done { result: 0, address: 0 }
}

pub(super) unsafe fn sterna_ram_fill_zero(to: *mut u8, len: usize) -> Done {
    for index in 0..len {
        // SAFETY: inside the range.
        unsafe { ptr::write_volatile(to.add(index), 0) };
    }
    Done { result: 0, address: 0 }
}

pub(super) unsafe fn sterna_ram_zero_bytes(start: *const u8, len: usize) -> Done {
    // SAFETY: inside the range.
    let is_zero = (0..len).all(|index| unsafe { ptr::read_volatile(start.add(index)) } == 0);
    Done { result: if is_zero { ZERO } else { 0 }, address: 0 }
}

pub(super) unsafe fn sterna_ram_zero_scalar(start: *const u8, lines: usize) -> Done {
    let words = start.cast::<u64>();
    // SAFETY: inside the lines, aligned to 8.
    let is_zero = (0..lines * 8).all(|index| unsafe { ptr::read_volatile(words.add(index)) } == 0);
    Done { result: if is_zero { ZERO } else { 0 }, address: 0 }
}
