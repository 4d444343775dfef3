//! Maps, reserves and unmaps the memory that the engine owns.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use super::{Backing, FileRange};
use crate::sys::check;

/// Alignment of mappings, so that the kernel and KVM can use transparent huge pages.
const ALIGN: usize = 2 << 20;

/// Creates a memfd of `len` bytes with a sealed size.
///
/// Without the seal, another process with the descriptor could shrink the file, and an access here would raise
/// SIGBUS.
pub(super) fn memfd(name: &str, len: usize, backing: Backing) -> Result<File, (&'static str, io::Error)> {
    let mut label: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(200).chain([0]).collect();
    label.shrink_to_fit();
    let flags = libc::MFD_CLOEXEC
        | libc::MFD_ALLOW_SEALING
        | match backing {
            Backing::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
            Backing::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
            Backing::Memfd | Backing::Anonymous => 0,
        };
    // SAFETY: `label` ends in a zero byte and has no other.
    let fd = unsafe { libc::memfd_create(label.as_ptr().cast(), flags) };
    let fd = check(libc::c_long::from(fd)).map_err(|error| ("memfd_create", error))?;
    // SAFETY: the kernel just gave us this descriptor and no one else knows it.
    let file = unsafe { File::from_raw_fd(fd as libc::c_int) };
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) };
    check(libc::c_long::from(result)).map_err(|error| ("ftruncate", error))?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    check(libc::c_long::from(result)).map_err(|error| ("fcntl(F_ADD_SEALS)", error))?;
    Ok(file)
}

/// Maps the memory at an address aligned to [`ALIGN`]. For huge pages, the kernel aligns.
pub(super) fn map(len: usize, backing: Backing, file: Option<&File>) -> io::Result<*mut u8> {
    let kind = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    let fd = file.map_or(-1, AsRawFd::as_raw_fd);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    if backing.is_huge() {
        // Without NORESERVE: too few huge pages are an error here instead of a SIGBUS later.
        return mmap(ptr::null_mut(), len, access, kind, fd);
    }
    let room = len.checked_add(ALIGN).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let base = mmap(ptr::null_mut(), room, libc::PROT_NONE, reserve, -1)?;
    let skip = base.align_offset(ALIGN);
    let address = base.wrapping_add(skip);
    let fixed = kind | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let mapped = mmap(address, len, access, fixed, fd);
    let unmap = |start: *mut u8, len: usize| {
        if len > 0 {
            // SAFETY: a part of the reservation made above that no one else knows.
            unsafe { libc::munmap(start.cast(), len) };
        }
    };
    if mapped.is_err() {
        unmap(base, room);
    } else {
        unmap(base, skip);
        unmap(address.wrapping_add(len), room - skip - len);
    }
    mapped
}

/// Reserves addresses without access rights, aligned for the backing's pages.
pub(super) fn reserve(len: usize, backing: Backing) -> io::Result<*mut u8> {
    let align = ALIGN.max(backing.unit_bytes() as usize);
    let room = len.checked_add(align).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let base = mmap(ptr::null_mut(), room, libc::PROT_NONE, flags, -1)?;
    let skip = base.align_offset(align);
    for (start, len) in [(base, skip), (base.wrapping_add(skip + len), align - skip)] {
        if len > 0 {
            // SAFETY: a part of the reservation made above that no one else knows.
            unsafe { libc::munmap(start.cast(), len) };
        }
    }
    Ok(base.wrapping_add(skip))
}

/// Maps shared memory over a whole mapping of the engine, `len` bytes at `address`.
pub(super) fn map_over(
    address: *mut u8,
    len: usize,
    access: libc::c_int,
    range: &FileRange,
) -> io::Result<()> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    mmap_at(address, len, access, flags, range.file.as_raw_fd(), range.offset).map(drop)
}

/// Unmaps the memory of a whole mapping of the engine; its addresses stay reserved.
pub(super) fn unmap_in_place(address: *mut u8, len: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    mmap(address, len, libc::PROT_NONE, flags, -1).map(drop)
}

/// Makes a whole mapping of the engine writable.
pub(super) fn make_writable(address: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: the mapping is the caller's own; permitting more access violates no reference.
    let result = unsafe { libc::mprotect(address.cast(), len, libc::PROT_READ | libc::PROT_WRITE) };
    check(libc::c_long::from(result)).map(drop)
}

fn mmap(
    address: *mut u8,
    len: usize,
    access: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<*mut u8> {
    mmap_at(address, len, access, flags, fd, 0)
}

fn mmap_at(
    address: *mut u8,
    len: usize,
    access: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: u64,
) -> io::Result<*mut u8> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: either the kernel chooses a free address, or (MAP_FIXED) the range is inside a reservation or is
    // a whole mapping of the engine. So no other mapping is replaced, and no Rust reference names its bytes.
    let mapped = unsafe { libc::mmap(address.cast(), len, access, flags, fd, offset) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast()) }
}
