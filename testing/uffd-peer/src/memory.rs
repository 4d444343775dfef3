//! Memory that is registered with a userfaultfd of this process, as a VMM has it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING, uffd_msg,
    uffdio_api, uffdio_continue, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_REGISTER};

/// `UFFD_FEATURE_EVENT_REMOVE`, which Firecracker always asks for.
const EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_FEATURE_MISSING_SHMEM` and `UFFD_FEATURE_MINOR_SHMEM`: memory that another process fills.
const SHARED: u64 = 1 << 5 | 1 << 10;
/// `_IO(0xAA, 0)` of `/dev/userfaultfd`.
const NEW: libc::c_ulong = 0xaa00;

/// One mapping. It lives until the process ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Mapping {
    /// Maps memory at a multiple of 2 MiB. `is_huge`: out of the host's huge pages.
    pub(crate) fn new(bytes: u64, is_huge: bool) -> io::Result<Self> {
        // Huge pages are reserved, so that a host without any refuses the mapping.
        let extra = if is_huge { libc::MAP_HUGETLB } else { libc::MAP_NORESERVE };
        let unit = 2usize << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra;
        let length = bytes as usize + if is_huge { 0 } else { unit };
        let start =
            // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory.
            unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = (start as u64).next_multiple_of(unit as u64);
        // SAFETY: the range is inside the mapping. Small pages are kept small, so that each is a fault of its own.
        unsafe { libc::madvise(address as *mut libc::c_void, bytes as usize, libc::MADV_NOHUGEPAGE) };
        Ok(Self { address, bytes })
    }

    /// Maps a part of a file that other processes write to.
    pub(crate) fn shared(file: &File, offset: u64, bytes: u64) -> io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        let (length, offset) = (bytes as usize, offset as libc::off_t);
        let start =
            // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory.
            unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, file.as_raw_fd(), offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address: start as u64, bytes })
    }

    /// Reads the 8 bytes at `offset`.
    pub(crate) fn read(&self, offset: u64) -> u64 {
        assert!(offset + 8 <= self.bytes && offset.is_multiple_of(8));
        // SAFETY: the offset is inside the mapping, which is never unmapped, and aligned.
        unsafe { ptr::read_volatile((self.address + offset) as *const u64) }
    }

    /// Writes the 8 bytes at `offset`.
    pub(crate) fn write(&self, offset: u64, value: u64) {
        assert!(offset + 8 <= self.bytes && offset.is_multiple_of(8));
        // SAFETY: the offset is inside the mapping, which is never unmapped and has no references, and aligned.
        unsafe { ptr::write_volatile((self.address + offset) as *mut u64, value) };
    }

    /// Gives bytes back to the kernel, as a balloon does.
    pub(crate) fn remove(&self, offset: u64, bytes: u64) -> io::Result<()> {
        assert!(offset + bytes <= self.bytes);
        // SAFETY: the range is inside the mapping, which has no references.
        let done = unsafe {
            libc::madvise((self.address + offset) as *mut libc::c_void, bytes as usize, libc::MADV_DONTNEED)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Creates a userfaultfd and registers all mappings for missing pages.
pub(crate) fn register(mappings: &[Mapping]) -> io::Result<OwnedFd> {
    register_for(mappings, EVENT_REMOVE, UFFDIO_REGISTER_MODE_MISSING)
}

/// Creates a userfaultfd and registers shared mappings: pages that the file lacks, and pages that only this mapping lacks.
pub(crate) fn register_shared(mappings: &[Mapping]) -> io::Result<OwnedFd> {
    register_for(mappings, SHARED, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR)
}

/// Maps pages that the file has. A page that is mapped already is right, too.
pub(crate) fn continue_page(descriptor: &OwnedFd, address: u64, bytes: u64) -> io::Result<()> {
    let range = uffdio_range { start: address, len: bytes };
    let mut request = uffdio_continue { range, mode: 0, mapped: 0 };
    // SAFETY: the request expects this structure, and changes no byte of the memory.
    match check(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_CONTINUE.into(), &raw mut request) }) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        done => done.map(drop),
    }
}

/// The address of the next fault, if one waits.
pub(crate) fn next_fault(descriptor: &OwnedFd) -> io::Result<Option<u64>> {
    let mut bytes = [0u8; size_of::<uffd_msg>()];
    match rustix::io::read(descriptor, &mut bytes) {
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        read => read?,
    };
    if u32::from(bytes[0]) != UFFD_EVENT_PAGEFAULT {
        return Err(io::Error::other(format!("event {:#x}", bytes[0])));
    }
    // The address follows the event and its flags.
    Ok(Some(bytes[16..24].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)) & !0xfff))
}

fn register_for(mappings: &[Mapping], features: u64, mode: u32) -> io::Result<OwnedFd> {
    let descriptor = create()?;
    let mut api = uffdio_api { api: u64::from(UFFD_API), features, ioctls: 0 };
    // SAFETY: the request expects this structure, which points to nothing.
    check(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_API.into(), &raw mut api) })?;
    for mapping in mappings {
        let range = uffdio_range { start: mapping.address, len: mapping.bytes };
        let mut register = uffdio_register { range, mode: u64::from(mode), ioctls: 0 };
        // SAFETY: the request expects this structure, and changes no byte of the memory.
        check(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_REGISTER.into(), &raw mut register) })?;
    }
    Ok(descriptor)
}

fn create() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: no pointers are passed.
    let number = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let number = if number >= 0 {
        number as libc::c_int
    } else {
        let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd")?;
        // SAFETY: the request takes a number and touches no memory.
        check(unsafe { libc::ioctl(device.as_raw_fd(), NEW, libc::c_ulong::from(flags as u32)) })?
    };
    // SAFETY: the kernel just gave this descriptor, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
