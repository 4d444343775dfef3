//! Wraps the system calls of this crate so that most callers need no `unsafe`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{page_region, pm_scan_arg};

use crate::mapping::kind::Kind;
use crate::page::PAGE_BYTES;

/// `_IOWR('f', 16, struct pm_scan_arg)`; linux-raw-sys has the structure but not the number.
const PAGEMAP_SCAN: libc::c_ulong =
    (3 << 30) | ((size_of::<pm_scan_arg>() as libc::c_ulong) << 16) | (0x66 << 8) | 16;

/// Converts the result `-1` of a system call into its errno.
pub(crate) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The file system of a file, as far as it matters for finding holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileSystem {
    Tmpfs,
    Hugetlbfs { page_bytes: u64 },
    Other,
}

impl FileSystem {
    /// Returns the kind and the page size of a shared mapping of such a file.
    pub(crate) fn kind(self) -> (Kind, u64) {
        match self {
            Self::Tmpfs => (Kind::Tmpfs, PAGE_BYTES),
            Self::Hugetlbfs { page_bytes } => (Kind::Hugetlbfs, page_bytes),
            Self::Other => (Kind::File, PAGE_BYTES),
        }
    }
}

/// Returns the file system of a file; memfds are on tmpfs or hugetlbfs.
pub(crate) fn file_system(file: BorrowedFd<'_>) -> io::Result<FileSystem> {
    let mut status = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel fills a structure of exactly this type.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), status.as_mut_ptr()) }.into())?;
    // SAFETY: fstatfs succeeded, so the structure is filled.
    let status = unsafe { status.assume_init() };
    Ok(match status.f_type {
        libc::TMPFS_MAGIC => FileSystem::Tmpfs,
        libc::HUGETLBFS_MAGIC => FileSystem::Hugetlbfs { page_bytes: status.f_bsize as u64 },
        _ => FileSystem::Other,
    })
}

/// Returns the access mode of a descriptor: `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
pub(crate) fn access_mode(file: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: no pointers are passed.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    check(flags.into()).map(|flags| flags as libc::c_int & libc::O_ACCMODE)
}

/// Returns the seals of a memfd or a file on tmpfs or hugetlbfs.
pub(crate) fn seals(file: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: no pointers are passed.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    check(seals.into()).map(|seals| seals as libc::c_int)
}

/// Adds seals to a memfd or a file on tmpfs or hugetlbfs.
pub(crate) fn seal(file: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: no pointers are passed.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    check(result.into()).map(drop)
}

/// Whether the `len` bytes from `at` on are inside the file and have no memory or block of their own. Keeps the file's position.
pub(crate) fn is_hole(file: &File, at: u64, len: u64) -> io::Result<bool> {
    if at >= file.metadata()?.len() {
        return Ok(false);
    }
    let seek = |to: libc::off_t, whence| {
        // SAFETY: no pointers are passed.
        check(unsafe { libc::lseek(file.as_raw_fd(), to, whence) })
    };
    let position = seek(0, libc::SEEK_CUR)?;
    let data = seek(at as libc::off_t, libc::SEEK_DATA);
    seek(position, libc::SEEK_SET)?;
    match data {
        Ok(data) => Ok(data as u64 >= at + len),
        // No data follows.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Whether the file's file system has no free block for this process.
pub(crate) fn is_full(file: &File) -> io::Result<bool> {
    // SAFETY: the structure is plain data, for which zeros are valid.
    let mut status: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the kernel fills the structure.
    check(unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut status) }.into())?;
    // A file system without a limit, such as a memfd's, has no blocks at all.
    Ok(status.f_blocks > 0 && status.f_bavail == 0)
}

/// Number of processors on which the calling thread may run; 1 if the kernel does not report it.
///
/// `std::thread::available_parallelism` also opens files of the control group, which the sandbox of a VMM may not permit.
pub fn processors() -> usize {
    // SAFETY: the set is plain data, for which zeros are valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is live, and its length is passed.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    // SAFETY: the set is initialised.
    if result == 0 { unsafe { libc::CPU_COUNT(&set) as usize }.max(1) } else { 1 }
}

/// Whether the error means that memory of a system call has failed (EFAULT, EHWPOISON).
pub fn is_failed_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EHWPOISON))
}

/// Number of pages that one call probes; limited by the capacity of a pipe.
pub(crate) const PROBED_AT_ONCE: usize = 512;

/// Makes the kernel read bytes, so that failed memory is an error instead of a signal.
pub(crate) struct Probe {
    /// The reading end, which empties the pipe after each probe.
    from: io::PipeReader,
    to: io::PipeWriter,
}

impl Probe {
    pub(crate) fn new() -> io::Result<Self> {
        let (from, to) = io::pipe()?;
        Ok(Probe { from, to })
    }

    /// Whether one byte is readable at each of these addresses, at most [`PROBED_AT_ONCE`].
    pub(crate) fn can_read(&self, addresses: &[*const u8]) -> io::Result<bool> {
        if addresses.is_empty() {
            return Ok(true);
        }
        assert!(addresses.len() <= PROBED_AT_ONCE, "so many fit the pipe");
        let vector = |address: &*const u8| libc::iovec { iov_base: address.cast_mut().cast(), iov_len: 1 };
        let vectors: Vec<libc::iovec> = addresses.iter().map(vector).collect();
        let written = loop {
            let (to, count) = (self.to.as_raw_fd(), vectors.len() as libc::c_int);
            // SAFETY: the list is live; only the kernel reads the listed addresses, and it checks them.
            let written = unsafe { libc::writev(to, vectors.as_ptr(), count) };
            match check(written as libc::c_long) {
                Ok(written) => break written as usize,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_failed_memory(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        };
        let mut bytes = [0; PROBED_AT_ONCE];
        (&self.from).read_exact(&mut bytes[..written])?;
        Ok(written == addresses.len())
    }
}

/// The pages that a scan reports, and its effect on them.
#[derive(Clone, Copy)]
pub(crate) struct Scan {
    /// A combination of `PM_SCAN_*`.
    pub flags: u32,
    /// A page must have all of these categories (`PAGE_IS_*`).
    pub all_of: u32,
    /// A page must have at least one of these categories, unless the mask is 0.
    pub any_of: u32,
    /// The categories in the report.
    pub report: u32,
}

/// Runs PAGEMAP_SCAN over `[start, start + len)` of the process that opened `pagemap`.
///
/// Every matching region is passed to `each(first byte relative to start, bytes, categories)`. The kernel's
/// `walk_end` may be before the end of the last reported region, so a page can be reported twice. Callers must
/// treat regions as sets (OR them into a bitmap) and never add up their lengths.
pub(crate) fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    start: u64,
    len: u64,
    scan: Scan,
    mut each: impl FnMut(u64, u64, u32),
) -> io::Result<()> {
    let end = start + len;
    let mut from = start;
    let mut regions = [page_region { start: 0, end: 0, categories: 0 }; 512];
    while from < end {
        let mut arg = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: u64::from(scan.flags),
            start: from,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: u64::from(scan.all_of),
            category_anyof_mask: u64::from(scan.any_of),
            return_mask: u64::from(scan.report),
        };
        // SAFETY: `arg` is a live pm_scan_arg whose `vec` names a live array of `vec_len` regions,
        // and the kernel writes to nothing else. Write-protecting pages changes no byte of them.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let found = match check(libc::c_long::from(found)) {
            Ok(found) => found as usize,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
            Err(error) => return Err(error),
        };
        for region in &regions[..found.min(regions.len())] {
            each(region.start - start, region.end - region.start, region.categories as u32);
        }
        // Continuing at the last region's end would be wrong: pages between walk_end and there may have been
        // reported but not write-protected.
        if arg.walk_end <= from {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        from = arg.walk_end;
    }
    Ok(())
}

/// Calls `ioctl` with an argument that the kernel reads and writes.
///
/// # Safety
/// `request` must expect a pointer to a `T`. All memory that `argument` points to must be valid for the
/// kernel's accesses.
pub(crate) unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: `argument` is a live `T`; the caller vouches for the rest.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(request), &raw mut *argument) };
    check(libc::c_long::from(result)).map(|value| value as libc::c_int)
}

/// Calls `ioctl` with a plain number as argument.
pub(crate) fn ioctl_value(fd: BorrowedFd<'_>, request: u32, value: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: KVM_CHECK_EXTENSION and its like take a number and touch no memory of ours.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(request), value) };
    check(libc::c_long::from(result)).map(|value| value as libc::c_int)
}

/// Opens a userfaultfd that needs no privilege.
///
/// User mode is enough: the kernel itself resolves asynchronous write protection, also for its own writes, and
/// sends nothing to the descriptor.
pub(crate) fn userfaultfd() -> io::Result<OwnedFd> {
    let flags =
        libc::O_CLOEXEC | libc::O_NONBLOCK | linux_raw_sys::general::UFFD_USER_MODE_ONLY as libc::c_int;
    // SAFETY: no pointers are passed.
    let fd = check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?;
    // SAFETY: the kernel just gave us this descriptor and no one else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}
