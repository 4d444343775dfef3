//! Simulates memory that fails, by a page whose access raises SIGBUS.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use sterna_ram::{PAGE_SIZE, RamBlock};

/// Replaces a page with a mapping beyond the end of an empty file, which raises SIGBUS on access.
pub fn break_page(block: &RamBlock, page: u64) {
    let offset = page * PAGE_SIZE as u64;
    block.write(offset, &[1]).unwrap();
    // SAFETY: the name ends in a zero byte.
    let file = unsafe { libc::memfd_create(c"nothing".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(file >= 0);
    // SAFETY: the kernel just gave us this descriptor.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let at = block.host_address().wrapping_add(offset as usize);
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: replaces one page of the block's own mapping, to which no reference exists.
    let mapped = unsafe { libc::mmap(at.cast(), PAGE_SIZE, access, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped, at.cast());
}
