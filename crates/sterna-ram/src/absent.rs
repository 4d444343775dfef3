//! Finds pages that were never populated, without reading them.
//!
//! A page that may have content is never reported as absent. The method depends on the kind of memory:
//!
//! - Shared file on tmpfs (memfds are): the page cache decides, because another process may have written
//!   through its own mapping. SEEK_DATA / SEEK_HOLE query it.
//! - Shared file on hugetlbfs: seeking is not supported. The result of this process's page table is used only
//!   if the guest's blocks over this file account for every allocated byte of the file. Otherwise no page is
//!   reported.
//! - Private anonymous memory: the page table decides. Swapped pages are populated; the shared zero page is
//!   absent.
//! - Private mapping of a file on tmpfs: a page that is missing in the page table reads as the file, so both
//!   are queried.
//! - The page table cannot be read (no `/proc`, Landlock, another user, seccomp): no page of the memory that needs it is
//!   reported. [`GuestRam::check_page_table`] tells the reason.
//! - Memory that a server of this process fills ([`crate::Filling`]): pages that the server owes are never reported.
//! - All others (files on disks, shared memory without a file, memory that is filled on demand): no page is
//!   reported.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use linux_raw_sys::general::{PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED};

use crate::bitmap::PageBitmap;
use crate::block::RamBlock;
use crate::error::RamError;
use crate::filling::without_owed;
use crate::guest::GuestRam;
use crate::kept::pagemap;
use crate::mapping::kind::Kind;
use crate::mapping::{FileRange, Mapping, Under};
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::sys::{self, Scan, check};

impl RamBlock {
    /// Finds the absent pages of `[first, first + count)` and sets their bits in `absent`.
    ///
    /// `absent` covers the whole block. A page is absent if it was never populated, or is known to be the
    /// kernel's shared zero page: it reads as zero. The call reads and populates no page, and leaves other bits
    /// unchanged.
    ///
    /// A page may be populated right after the check. The caller must therefore start a dirty source first.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::BitmapSize`], [`RamError::System`].
    pub fn mark_absent(&self, first: u64, count: u64, absent: &PageBitmap) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        if absent.pages() != self.pages() {
            return Err(RamError::BitmapSize {
                block: self.name().to_owned(),
                bitmap_pages: absent.pages(),
                block_pages: self.pages(),
            });
        }
        holes(self, first, count, &mut |first, count| {
            absent.set_range(first, count);
        })
        .map_err(|(call, source)| self.system(call, source))
    }

    /// Returns the bytes of memory that the block occupies; for shared memory, by all processes.
    ///
    /// If the kernel cannot tell which pages are populated, all pages count.
    ///
    /// # Errors
    /// [`RamError::System`].
    pub fn resident_bytes(&self) -> Result<u64, RamError> {
        if let Some(bytes) = whole_file_bytes(self).map_err(|source| self.system("fstat", source))? {
            return Ok(bytes);
        }
        if self.mapping.len() == 0 {
            return Ok(0);
        }
        let mut missing = 0;
        holes(self, 0, self.pages(), &mut |_, count| missing += count)
            .map_err(|(call, source)| self.system(call, source))?;
        Ok((self.pages() - missing) * PAGE_BYTES)
    }

    /// Whether every page is known to be populated, so that [`RamBlock::populate`] is unnecessary.
    ///
    /// The check is cheap. It returns `false` if a cheap check is impossible (anonymous memory).
    pub fn is_fully_populated(&self) -> bool {
        is_file_full(self)
    }
}

impl GuestRam {
    /// Checks whether absent pages can be found in all blocks whose memory needs the page table for that.
    ///
    /// If they cannot be found, [`RamBlock::mark_absent`] reports no page of these blocks, and every page is read and sent.
    /// Memory of a memfd on normal pages does not need the page table.
    ///
    /// # Errors
    /// [`RamError::PageTable`] with the name of the first of these blocks.
    pub fn check_page_table(&self) -> Result<(), RamError> {
        let needs = |block: &&RamBlock| {
            let kind = block.mapping.under().kind;
            let is_asked = matches!(kind, Kind::Anonymous | Kind::PrivateTmpfs | Kind::Hugetlbfs);
            is_asked && block.mapping.len() > 0 && !block.mapping.is_filled_on_demand()
        };
        let Some(block) = self.blocks().iter().find(needs) else { return Ok(()) };
        match page_table(&block.mapping, 0, 1, &mut |_, _| {}) {
            Err((call, source)) if is_unreachable(&source) => {
                Err(RamError::PageTable { block: block.name().to_owned(), call, source })
            }
            _ => Ok(()),
        }
    }
}

/// The name of a failed system call, and its error.
type Failed = (&'static str, io::Error);

/// Calls `hole(first page, pages)` for the absent parts of `[first, first + count)`, in ascending order.
///
/// The range must be inside the block.
pub(crate) fn holes(
    block: &RamBlock,
    first: u64,
    count: u64,
    hole: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    if count == 0 || block.mapping.is_filled_on_demand() {
        return Ok(());
    }
    // A page that is placed after this question is in memory when the kernel is asked.
    let owed = block.mapping.filled.owed(first, count);
    let mut not_owed = |first: u64, count: u64| without_owed(&owed, (first, count), hole);
    let hole: &mut dyn FnMut(u64, u64) = &mut not_owed;
    let ours = |hole: &mut dyn FnMut(u64, u64)| match gaps(first, count, hole, |data| {
        page_table(&block.mapping, first, count, data)
    }) {
        Err((_, error)) if is_unreachable(&error) => Ok(()),
        result => result,
    };
    let Under { kind, file } = block.mapping.under();
    match (kind, &file) {
        (Kind::Anonymous, _) => ours(hole),
        (Kind::Tmpfs, Some(range)) => {
            // Seeking walks every populated page. If none is absent, one fstat replaces the walk.
            match whole_file_bytes(block).map_err(|error| ("fstat", error))? {
                Some(bytes) if bytes >= block.len_bytes() => Ok(()),
                _ => seek_holes(range, first, count, hole),
            }
        }
        (Kind::PrivateTmpfs, Some(range)) => {
            let mut failed = Ok(());
            ours(&mut |first, count| {
                if failed.is_ok() {
                    failed = seek_holes(range, first, count, hole);
                }
            })?;
            failed
        }
        (Kind::Hugetlbfs, Some(_)) => {
            // A page that only another process touched is in the file but not in this process's page table.
            if is_all_mapped(&block.mapping)? { ours(hole) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

/// Whether the page table has every allocated page of a hugetlbfs file.
///
/// The pages may be in this mapping or in its siblings.
fn is_all_mapped(mapping: &Arc<Mapping>) -> Result<bool, Failed> {
    let mut parts = mapping.siblings();
    parts.push(Arc::clone(mapping));
    let begin = |part: &Mapping| part.file().map_or(0, |range| range.offset);
    parts.sort_by_key(|part| begin(part));
    // A page in two overlapping mappings would be counted twice.
    let overlap = |pair: &[Arc<Mapping>]| begin(&pair[0]) + pair[0].len() as u64 > begin(&pair[1]);
    let Some(range) = mapping.file().filter(|_| !parts.windows(2).any(overlap)) else { return Ok(false) };
    let mut mapped = 0;
    for part in &parts {
        let mut until = 0;
        let read = page_table(part, 0, part.len() as u64 >> PAGE_SHIFT, &mut |first, count| {
            mapped += (first + count).saturating_sub(until.max(first));
            until = until.max(first + count);
        });
        match read {
            Err((_, error)) if is_unreachable(&error) => return Ok(false),
            result => result?,
        }
    }
    let held = range.file.metadata().map_err(|error| ("fstat", error))?.blocks() * 512;
    Ok(held == mapped * PAGE_BYTES)
}

/// Returns the bytes that a block's file occupies.
///
/// `None` unless the file system counts them exactly and the block covers the whole file.
pub(crate) fn whole_file_bytes(block: &RamBlock) -> io::Result<Option<u64>> {
    let Under { kind: Kind::Tmpfs | Kind::Hugetlbfs, file: Some(range) } = block.mapping.under() else {
        return Ok(None);
    };
    let status = range.file.metadata()?;
    let is_whole = range.offset == 0 && status.len() == block.len_bytes();
    Ok(is_whole.then(|| status.blocks() * 512))
}

/// Whether the file, or the part of a file, of a block is known to have no holes.
fn is_file_full(block: &RamBlock) -> bool {
    match (whole_file_bytes(block), block.mapping.kind(), block.mapping.file()) {
        (Ok(Some(bytes)), ..) => bytes >= block.len_bytes(),
        (Ok(None), Kind::Tmpfs, Some(range)) => {
            let end = range.offset + block.len_bytes();
            seek(range.file.as_fd(), range.offset, libc::SEEK_HOLE).is_ok_and(|hole| hole >= end)
        }
        _ => false,
    }
}

/// Converts ascending ranges of data, which may overlap, into the gaps between them.
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
    range: &FileRange,
    first: u64,
    count: u64,
    hole: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    let file = range.file.as_fd();
    let begin = range.offset;
    let end = begin + (first + count) * PAGE_BYTES;
    let mut at = begin + first * PAGE_BYTES;
    while at < end {
        let data = match seek(file, at, libc::SEEK_DATA) {
            Ok(data) => data.min(end),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => end,
            Err(error) => return Err(("lseek(SEEK_DATA)", error)),
        };
        // Rounded inwards: a page is absent only if the hole covers it completely. (shmem returns whole pages.)
        let (from, to) = ((at - begin).div_ceil(PAGE_BYTES), (data - begin) / PAGE_BYTES);
        if to > from {
            hole(from, to - from);
        }
        if data >= end {
            break;
        }
        at = match seek(file, data, libc::SEEK_HOLE) {
            Ok(next) => next.max(data + 1),
            // The page was given back meanwhile; the loop continues after it.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => data + PAGE_BYTES,
            Err(error) => return Err(("lseek(SEEK_HOLE)", error)),
        };
    }
    Ok(())
}

/// Seeks without regard to the file's position, so threads may seek in parallel.
fn seek(file: BorrowedFd<'_>, at: u64, whence: libc::c_int) -> io::Result<u64> {
    // SAFETY: no pointers are passed.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    check(found).map(|found| found as u64)
}

/// Calls `data` for the populated parts of the range, in ascending order.
fn page_table(
    mapping: &Mapping,
    first: u64,
    count: u64,
    data: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    let start = mapping.address() as u64 + first * PAGE_BYTES;
    let scan = Scan {
        flags: 0,
        all_of: 0,
        any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        report: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_PFNZERO,
    };
    let pagemap = pagemap().map_err(|error| ("open(/proc/self/pagemap)", error))?;
    let pagemap = pagemap.as_fd();
    let scanned = sys::pagemap_scan(pagemap, start, count * PAGE_BYTES, scan, |from, bytes, categories| {
        if categories & PAGE_IS_PFNZERO == 0 {
            data(first + (from >> PAGE_SHIFT), bytes >> PAGE_SHIFT);
        }
    });
    match scanned {
        // Linux before 6.7 does not support the ioctl.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            pagemap_entries(pagemap, start, first, count, data)
        }
        result => result.map_err(|error| ("ioctl(PAGEMAP_SCAN)", error)),
    }
}

/// Whether the error means that this process may not read its page table.
///
/// ENOENT: no `/proc`. EACCES: Landlock, or the process has changed its user. EPERM and ENOSYS: a seccomp filter.
pub(crate) fn is_unreachable(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EACCES | libc::EPERM | libc::ENOSYS))
}

/// Does the same by reading `/proc/self/pagemap`, eight bytes per page.
fn pagemap_entries(
    pagemap: BorrowedFd<'_>,
    start: u64,
    first: u64,
    count: u64,
    data: &mut dyn FnMut(u64, u64),
) -> Result<(), Failed> {
    /// Bit 63 of an entry: present; bit 62: swapped.
    const POPULATED: u64 = 3 << 62;
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
