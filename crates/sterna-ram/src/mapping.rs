//! One mapping of this process: created, aligned, unmapped on drop.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::PAGE_BYTES;
use crate::sys::check;

/// What a block's memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// A memfd, mapped shared: can be handed to another process (vhost-user).
    Memfd,
    /// Private anonymous memory.
    Anonymous,
    /// A memfd on huge pages of 2 MiB, which the host must have reserved.
    Huge2M,
    /// A memfd on huge pages of 1 GiB, which the host must have reserved.
    Huge1G,
}

impl Backing {
    /// Bytes in the smallest piece that this backing gives and takes.
    pub fn unit_bytes(self) -> u64 {
        match self {
            Backing::Memfd | Backing::Anonymous => PAGE_BYTES,
            Backing::Huge2M => 2 << 20,
            Backing::Huge1G => 1 << 30,
        }
    }

    /// Whether the memory lies on reserved huge pages.
    pub fn is_huge(self) -> bool {
        matches!(self, Backing::Huge2M | Backing::Huge1G)
    }
}

/// Mappings start at a multiple of this, so that the kernel and KVM may use transparent huge pages.
const ALIGN: usize = 2 << 20;

/// A live mapping with the memfd behind it, if there is one.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: *mut u8,
    len: usize,
    file: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through raw pointers
// with volatile or atomic operations, and the address never changes until drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared use hands out raw pointers only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes (a multiple of the backing's unit, above 0). On failure says which call failed.
    pub(crate) fn new(name: &str, len: usize, backing: Backing) -> Result<Self, (&'static str, io::Error)> {
        let file = match backing {
            Backing::Anonymous => None,
            _ => Some(memfd(name, len, backing)?),
        };
        let address = map(len, backing, file.as_ref()).map_err(|error| ("mmap", error))?;
        Ok(Mapping { address, len, file })
    }

    /// No memory at all.
    pub(crate) fn none() -> Self {
        Mapping { address: ptr::null_mut(), len: 0, file: None }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Bytes that are mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    /// `madvise` on bytes `[offset, offset + len)`, which must lie inside the mapping.
    pub(crate) fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let (offset, len) = (offset as usize, len as usize);
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        loop {
            // SAFETY: the range lies inside our own mapping (asserted), over which no Rust reference
            // exists, so whatever the advice does to its contents breaks no rule of the language.
            let result = unsafe { libc::madvise(self.address.add(offset).cast(), len, advice) };
            match check(libc::c_long::from(result)) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives the memory of bytes `[offset, offset + len)` back; they read as zero afterwards.
    /// On failure says which call failed; the bytes are then anything.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> Result<(), (&'static str, io::Error)> {
        let Some(file) = self.file() else {
            return match self.advise(offset, len, libc::MADV_DONTNEED) {
                // What a locked mapping says. Linux 5.18 has an advice of its own for those.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self
                    .advise(offset, len, libc::MADV_DONTNEED_LOCKED)
                    .map_err(|_| ("madvise(MADV_DONTNEED)", error)),
                done => done.map_err(|error| ("madvise(MADV_DONTNEED)", error)),
            };
        };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: no pointers are passed; the file is ours.
            let result =
                unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) };
            match check(libc::c_long::from(result)) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(("fallocate(PUNCH_HOLE)", error)),
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: we own exactly this mapping. RamSlices borrow the block, and holders of the raw
        // address promised to keep the block alive (RamBlock::host_address).
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// Creates a memfd of `len` bytes whose size is sealed: nobody who is handed the descriptor can shrink
/// it under our mapping and so kill us with SIGBUS.
fn memfd(name: &str, len: usize, backing: Backing) -> Result<OwnedFd, (&'static str, io::Error)> {
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
    // SAFETY: the kernel just gave us this descriptor and nobody else knows it.
    let file = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) };
    check(libc::c_long::from(result)).map_err(|error| ("ftruncate", error))?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    check(libc::c_long::from(result)).map_err(|error| ("fcntl(F_ADD_SEALS)", error))?;
    Ok(file)
}

/// Maps the memory at an address aligned to [`ALIGN`] (huge pages: the kernel aligns).
fn map(len: usize, backing: Backing, file: Option<&OwnedFd>) -> io::Result<*mut u8> {
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
            // SAFETY: a part of the reservation made above that nobody else knows.
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

fn mmap(
    address: *mut u8,
    len: usize,
    access: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<*mut u8> {
    // SAFETY: either the kernel chooses a free address, or (MAP_FIXED, in `map`) the range lies inside
    // a reservation of ours, so no one else's mapping is replaced.
    let mapped = unsafe { libc::mmap(address.cast(), len, access, flags, fd, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast()) }
}
