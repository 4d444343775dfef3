//! Descriptors that a VMM opens before its sandbox closes: `/proc/self/pagemap` and `/dev/userfaultfd`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::page::PAGE_SIZE;
use crate::sys::check;

const PAGEMAP: &str = "/proc/self/pagemap";
const USERFAULTFD: &str = "/dev/userfaultfd";

static KEPT_PAGEMAP: AtomicPtr<Pagemap> = AtomicPtr::new(null_mut());
static KEPT_USERFAULTFD: AtomicPtr<Kept> = AtomicPtr::new(null_mut());

/// Opens `/proc/self/pagemap` now, and keeps it open for the rest of this process.
///
/// By this file the engine finds pages of private memory that were never populated, so that it sends them unread.
/// [`UffdDirtyLog`](crate::dirty::UffdDirtyLog) finds writes by it. Without this call the engine opens the file
/// for each use.
///
/// Call it before Landlock, a chroot, a change of the user or seccomp makes the file unreachable. A program must not close
/// the descriptor. After a fork the child opens its own file, because the inherited descriptor shows the parent's memory;
/// the child may call this function again. Further calls in the same process do nothing.
///
/// # Errors
/// The file cannot be opened. Migrations work then, and read every page.
pub fn keep_pagemap() -> io::Result<()> {
    let earlier = KEPT_PAGEMAP.load(Ordering::Acquire);
    if kept_pagemap().is_some() {
        return Ok(());
    }
    let new =
        Pagemap { kept: Kept::open(File::options().read(true), PAGEMAP)?, is_ours: flag_without_forks()? };
    keep(&KEPT_PAGEMAP, earlier, new);
    Ok(())
}

/// Opens `/dev/userfaultfd` now, and keeps it open for the rest of this process.
///
/// Postcopy's destination, lazy restores and the primary of a protected guest need a userfaultfd that blocks also the
/// kernel's accesses. A process with CAP_SYS_PTRACE makes one by itself, and every process where
/// `vm.unprivileged_userfaultfd` is 1. Other processes need this file. Call the function before the process gives
/// up the right to open it. A program must not close the descriptor. Further calls do nothing.
///
/// # Errors
/// The file cannot be opened.
pub fn keep_userfaultfd() -> io::Result<()> {
    let earlier = KEPT_USERFAULTFD.load(Ordering::Acquire);
    if kept_userfaultfd().is_none() {
        keep(&KEPT_USERFAULTFD, earlier, Kept::open(File::options().read(true).write(true), USERFAULTFD)?);
    }
    Ok(())
}

/// The page table of this process, open.
#[derive(Debug)]
pub(crate) enum OpenPagemap {
    Kept(&'static File),
    New(File),
}

impl AsFd for OpenPagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Kept(file) => file.as_fd(),
            Self::New(file) => file.as_fd(),
        }
    }
}

/// Returns the kept page table, or opens it.
///
/// A file that was opened here must not be kept by the engine itself. After a fork, a child would read its parent's page
/// tables. A daemon that closes all descriptors would read another file with the same number. Opening takes
/// some microseconds, less than most scans.
pub(crate) fn pagemap() -> io::Result<OpenPagemap> {
    match kept_pagemap() {
        Some(file) => Ok(OpenPagemap::Kept(file)),
        None => File::open(PAGEMAP).map(OpenPagemap::New),
    }
}

/// Returns `/dev/userfaultfd`, kept or opened now.
pub(crate) fn with_userfaultfd_device<T>(act: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
    match kept_userfaultfd() {
        Some(file) => act(file.as_fd()),
        None => act(File::options().read(true).write(true).open(USERFAULTFD)?.as_fd()),
    }
}

/// A descriptor and the identity of its file.
struct Kept {
    file: File,
    identity: (u64, u64),
}

impl Kept {
    fn open(options: &std::fs::OpenOptions, path: &str) -> io::Result<Self> {
        let file = options.open(path)?;
        let identity = identity(&file)?;
        Ok(Self { file, identity })
    }

    /// Returns the file, unless the program has closed its descriptor: the number may name another file since.
    fn file(&self) -> Option<&File> {
        identity(&self.file).is_ok_and(|now| now == self.identity).then_some(&self.file)
    }
}

struct Pagemap {
    kept: Kept,
    /// 1 in the process that opened the file, and 0 in its children.
    is_ours: &'static AtomicU32,
}

fn kept_pagemap() -> Option<&'static File> {
    // SAFETY: the pointer is null, or from `keep`, which leaks the value.
    let kept = unsafe { KEPT_PAGEMAP.load(Ordering::Acquire).as_ref() }?;
    (kept.is_ours.load(Ordering::Relaxed) == 1).then(|| kept.kept.file()).flatten()
}

fn kept_userfaultfd() -> Option<&'static File> {
    // SAFETY: the pointer is null, or from `keep`, which leaks the value.
    unsafe { KEPT_USERFAULTFD.load(Ordering::Acquire).as_ref() }?.file()
}

/// Stores a value that is never freed, unless another thread has stored one meanwhile.
///
/// An earlier value is leaked, too: other threads may use it. A lock would not be usable in a forked child.
fn keep<T>(place: &AtomicPtr<T>, earlier: *mut T, value: T) {
    let new = Box::into_raw(Box::new(value));
    if place.compare_exchange(earlier, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: the pointer is from `Box::into_raw` above, and no thread has seen it.
        drop(unsafe { Box::from_raw(new) });
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|status| (status.dev(), status.ino()))
}

/// Returns a number that is 1 here, and that a fork sets to 0 in the child.
///
/// The kernel zeroes the page. A comparison of process ids would fail across PID namespaces, where both may be 1.
fn flag_without_forks() -> io::Result<&'static AtomicU32> {
    // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory of ours.
    let page = unsafe {
        libc::mmap(
            null_mut(),
            PAGE_SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page is mapped and ours alone. The advice changes only what a fork copies.
    let advised = check(unsafe { libc::madvise(page, PAGE_SIZE, libc::MADV_WIPEONFORK) }.into());
    if let Err(error) = advised {
        // SAFETY: the page was mapped above, and no reference to it exists.
        unsafe { libc::munmap(page, PAGE_SIZE) };
        return Err(error);
    }
    // SAFETY: the page is aligned, zeroed, never unmapped, and accessed only as this atomic.
    let flag = unsafe { &*page.cast::<AtomicU32>() };
    flag.store(1, Ordering::Relaxed);
    Ok(flag)
}
