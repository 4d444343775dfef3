//! Finding pages that were never populated, without reading one.
//!
//! - memfd: the page cache is the truth (another process may have written through its own mapping), and
//!   SEEK_DATA / SEEK_HOLE ask it.
//! - memfd on huge pages: cannot seek. Our own page table is asked, and believed only if it accounts for
//!   every byte that the file holds; otherwise nothing is called absent.
//! - anonymous: the page table is the truth. Swapped pages are there; the shared zero page is not.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::general::{PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED};

use crate::sys::{self, Scan, check};
use crate::{PAGE_BYTES, PAGE_SHIFT, RamBlock};

/// A system call that failed, and how.
type Failed = (&'static str, io::Error);

/// Calls `hole(first page, pages)` for the absent parts of `[first, first + count)` in ascending order.
/// The range must lie inside the block.
pub(crate) fn holes(
    block: &RamBlock,
    first: u64,
    count: u64,
    hole: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    if count == 0 {
        return Ok(());
    }
    match block.file() {
        None => gaps(first, count, hole, |data| page_table(block, first, count, data)),
        Some(file) if block.backing().is_huge() => {
            // Pages that only another process touched are in the file but not in our page table.
            let mut ours = 0;
            let whole = block.pages();
            let mut until = 0;
            page_table(block, 0, whole, &mut |first, count| {
                ours += (first + count).saturating_sub(until.max(first));
                until = until.max(first + count);
            })?;
            let held = file_bytes(file).map_err(|error| ("fstat", error))?;
            if held != ours * PAGE_BYTES {
                return Ok(());
            }
            gaps(first, count, hole, |data| page_table(block, first, count, data))
        }
        // Seeking walks every page that is there: where none is missing, one question saves it.
        Some(file) if file_bytes(file).map_err(|error| ("fstat", error))? >= block.len_bytes() => Ok(()),
        Some(file) => seek_holes(file, first, count, hole),
    }
}

/// Bytes that a memfd holds.
pub(crate) fn file_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills a structure of exactly this type.
    check(unsafe { libc::fstat(file.as_raw_fd(), status.as_mut_ptr()) }.into())?;
    // SAFETY: fstat succeeded, so the structure is filled.
    let status = unsafe { status.assume_init() };
    Ok(status.st_blocks as u64 * 512)
}

/// Turns ascending ranges of data (which may overlap) into the gaps between them.
fn gaps(
    first: u64,
    count: u64,
    hole: &mut dyn FnMut(u64, u64),
    data: impl FnOnce(&mut dyn FnMut(u64, u64)) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let mut next = first;
    data(&mut |from, pages| {
        if from > next {
            hole(next, from - next);
        }
        next = next.max(from + pages);
    })?;
    let end = first + count;
    if end > next {
        hole(next, end - next);
    }
    Ok(())
}

fn seek_holes(
    file: BorrowedFd<'_>,
    first: u64,
    count: u64,
    hole: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    let end = (first + count) * PAGE_BYTES;
    let mut at = first * PAGE_BYTES;
    while at < end {
        let data = match seek(file, at, libc::SEEK_DATA) {
            Ok(data) => data.min(end),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => end,
            Err(error) => return Err(("lseek(SEEK_DATA)", error)),
        };
        // Rounded inwards: a page is a hole only if all of it is. (shmem answers in whole pages.)
        let (from, to) = (at.div_ceil(PAGE_BYTES), data / PAGE_BYTES);
        if to > from {
            hole(from, to - from);
        }
        if data >= end {
            break;
        }
        at = match seek(file, data, libc::SEEK_HOLE) {
            Ok(next) => next.max(data + 1),
            // The page was given back meanwhile; look again from here.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => data + PAGE_BYTES,
            Err(error) => return Err(("lseek(SEEK_HOLE)", error)),
        };
    }
    Ok(())
}

/// The answer depends on `at` alone, not on the file's position, so threads may ask at once.
fn seek(file: BorrowedFd<'_>, at: u64, whence: libc::c_int) -> io::Result<u64> {
    // SAFETY: no pointers are passed.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    check(found).map(|found| found as u64)
}

/// Calls `data` for the populated parts of the range, ascending.
fn page_table(
    block: &RamBlock,
    first: u64,
    count: u64,
    data: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    let start = block.host_address() as u64 + first * PAGE_BYTES;
    let scan = Scan {
        flags: 0,
        all_of: 0,
        any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        report: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_PFNZERO,
    };
    let scanned = sys::pagemap_scan(start, count * PAGE_BYTES, scan, |from, bytes, categories| {
        if categories & PAGE_IS_PFNZERO == 0 {
            data(first + (from >> PAGE_SHIFT), bytes >> PAGE_SHIFT);
        }
    });
    match scanned {
        // Linux before 6.7 does not know the ioctl.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            pagemap_entries(start, first, count, data)
        }
        result => result.map_err(|error| ("ioctl(PAGEMAP_SCAN)", error)),
    }
}

/// The same by reading `/proc/self/pagemap`, eight bytes a page.
fn pagemap_entries(start: u64, first: u64, count: u64, data: &mut dyn FnMut(u64, u64)) -> Result<(), Failed> {
    /// Bit 63 of an entry: present; bit 62: swapped.
    const POPULATED: u64 = 3 << 62;
    let pagemap = sys::pagemap().map_err(|error| ("open(/proc/self/pagemap)", error))?;
    let mut entries = [0u64; 1024];
    let mut done = 0;
    while done < count {
        let want = (count - done).min(entries.len() as u64);
        let offset = ((start >> PAGE_SHIFT) + done) * 8;
        // SAFETY: the buffer has room for `want` entries of 8 bytes.
        let got = unsafe {
            libc::pread(
                pagemap.as_raw_fd(),
                entries.as_mut_ptr().cast(),
                want as usize * 8,
                offset as libc::off_t,
            )
        };
        let got = check(got as libc::c_long).map_err(|error| ("pread(pagemap)", error))? as u64 / 8;
        if got == 0 {
            return Err(("pread(pagemap)", io::ErrorKind::UnexpectedEof.into()));
        }
        for (index, entry) in entries[..got as usize].iter().enumerate() {
            if entry & POPULATED != 0 {
                data(first + done + index as u64, 1);
            }
        }
        done += got;
    }
    Ok(())
}
