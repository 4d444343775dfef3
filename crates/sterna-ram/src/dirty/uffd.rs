//! Tracks writes by userfaultfd write protection that the kernel resolves itself (WP_ASYNC), synced by
//! PAGEMAP_SCAN.
//!
//! The first write to a protected page removes the protection without a notification. A scan reports pages that
//! are not protected and protects them in the same step, so syncing re-arms. It sees the writes of this
//! process's threads, of the kernel on their behalf, and of KVM. It does not see writes through another mapping
//! of a memfd (a vhost-user device).
//!
//! Re-arming scans once more. Writes since the sync to pages that are about to be read need not be reported,
//! and would otherwise be sent twice. If such a scan finds other pages, they are kept for the next sync.
//!
//! Memory of the VMM is tracked only where its permissions allow userfaultfd.
//!
//! At the start, shared memory is protected completely, also pages that are not mapped here (by markers in the
//! page table, eight bytes per page). In anonymous memory, an absent page needs no marker: once populated, it
//! is unprotected and counts as written. Therefore a sparse guest stays sparse, and
//! [`crate::RamBlock::mark_absent`] still finds absent pages in the same page table.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use linux_raw_sys::general::{
    PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, UFFD_API,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range, uffdio_register,
    uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT};
use parking_lot::RwLock;

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::block::RamBlock;
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::kept::{OpenPagemap, pagemap};
use crate::mapping::kind::Kind;
use crate::page::PAGE_SHIFT;
use crate::sys::{self, Scan};

const NAME: &str = "userfaultfd";

/// `UFFDIO_WRITEPROTECT_MODE_WP`, whose definition in the headers the bindings miss.
const MODE_WP: u64 = 1;

/// Tracks writes by userfaultfd. It needs Linux 6.7 and no privilege.
#[derive(Debug)]
pub struct UffdDirtyLog {
    ram: GuestRam,
    running: RwLock<Option<Running>>,
    /// Pages that were found while re-arming others, and not reported by a sync yet.
    kept: DirtyBitmaps,
    /// Whether `kept` contains pages.
    keeps: AtomicBool,
}

/// The descriptors of a running log.
#[derive(Debug)]
struct Running {
    userfaultfd: OwnedFd,
    /// The page table of the process that started the log. The userfaultfd is of this process, too.
    pagemap: OpenPagemap,
}

impl UffdDirtyLog {
    /// Makes a log over all blocks of `ram`. It is not started.
    pub fn new(ram: GuestRam) -> Self {
        let kept = DirtyBitmaps::new(&ram);
        UffdDirtyLog { ram, running: RwLock::new(None), kept, keeps: AtomicBool::new(false) }
    }

    /// Whether this machine's kernel supports the log.
    pub fn is_supported() -> bool {
        open().is_ok() && open_pagemap().is_ok()
    }

    /// Makes only the system calls of a sync, so that benches can measure the rest.
    ///
    /// The reported pages are lost.
    ///
    /// # Errors
    /// The errors of [`DirtySource::sync`].
    #[cfg(feature = "bench")]
    pub fn system_calls_alone(&self) -> Result<(), DirtyError> {
        let running = self.running.read();
        let Some(running) = &*running else {
            return Err(DirtyError::NotStarted { origin: NAME });
        };
        self.scan(running, |_, _, _| {})
    }

    /// Scans all blocks and protects the written pages again. Calls `each(block, first page, pages)`.
    fn scan(&self, running: &Running, mut each: impl FnMut(usize, u64, u64)) -> Result<(), DirtyError> {
        for (index, block) in self.ram.blocks().iter().enumerate() {
            self.scan_pages(running, index, 0, block.pages(), |first, count| each(index, first, count))?;
        }
        Ok(())
    }

    /// Scans and protects pages of one block, which must contain them. Calls `each(first page, pages)`.
    fn scan_pages(
        &self,
        running: &Running,
        index: usize,
        first: u64,
        count: u64,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), DirtyError> {
        let block = self.ram.block(index);
        let scan = if needs_markers(block) { WRITTEN_SHARED } else { WRITTEN_ANONYMOUS };
        let start = block.host_address() as u64 + (first << PAGE_SHIFT);
        sys::pagemap_scan(running.pagemap.as_fd(), start, count << PAGE_SHIFT, scan, |at, bytes, _| {
            each(first + (at >> PAGE_SHIFT), bytes >> PAGE_SHIFT);
        })
        .map_err(|source| failed("ioctl(PAGEMAP_SCAN)", index, source))
    }

    /// Keeps the written pages that are not in `about_to_be_read`, and returns whether there were any.
    fn keep_others(&self, block: usize, first: u64, count: u64, about_to_be_read: &PageBitmap) -> bool {
        let (kept, read) = (self.kept.block(block).words(), about_to_be_read.words());
        let mut keeps = false;
        for index in first / 64..(first + count).div_ceil(64) {
            let from = first.max(index * 64) - index * 64;
            let to = (first + count).min(index * 64 + 64) - index * 64;
            let written = (u64::MAX >> (64 - (to - from))) << from;
            let others = written & !read[index as usize].load(Ordering::Acquire);
            if others != 0 {
                kept[index as usize].fetch_or(others, Ordering::AcqRel);
                keeps = true;
            }
        }
        keeps
    }

    /// Moves the kept pages into `into`, and returns how many bits were clear there.
    fn take_kept(&self, into: &mut DirtyBitmaps) -> u64 {
        let mut newly_dirty = 0;
        for (index, kept) in self.kept.blocks().iter().enumerate() {
            let words = (0..).step_by(64).zip(kept.words());
            for (page, word) in words.filter(|(_, word)| word.load(Ordering::Relaxed) != 0) {
                let bits = word.swap(0, Ordering::AcqRel);
                newly_dirty += into.block_mut(index).merge_words(page, &[bits]);
            }
        }
        newly_dirty
    }

    fn register(&self, fd: &OwnedFd, pagemap: BorrowedFd<'_>) -> Result<(), DirtyError> {
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let mut register =
                uffdio_register { range: range(block), mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
            // SAFETY: the request expects this structure; registering changes no byte of the block.
            unsafe { sys::ioctl(fd.as_fd(), UFFDIO_REGISTER, &mut register) }
                .map_err(|source| failed("UFFDIO_REGISTER", index, source))?;
            protect(fd, pagemap, block).map_err(|(call, source)| failed(call, index, source))?;
        }
        Ok(())
    }

    /// Unregisters all blocks. Continues after an error, and returns the first one.
    fn unregister(&self, fd: &OwnedFd) -> Result<(), DirtyError> {
        let mut result = Ok(());
        for (index, block) in self.ram.blocks().iter().enumerate() {
            // SAFETY: the request expects this structure; unregistering lifts the protection and
            // changes no byte.
            let done = unsafe { sys::ioctl(fd.as_fd(), UFFDIO_UNREGISTER, &mut range(block)) };
            let done = done.map(|_| ()).map_err(|source| failed("UFFDIO_UNREGISTER", index, source));
            result = result.and(done);
        }
        result
    }
}

impl DirtySource for UffdDirtyLog {
    fn start(&self) -> Result<(), DirtyError> {
        let mut running = self.running.write();
        if running.is_some() {
            return Ok(());
        }
        if let Some(block) = self.ram.blocks().iter().find(|block| !block.permissions().userfaultfd) {
            let action = "register with userfaultfd";
            return Err(DirtyError::NotPermitted { origin: NAME, action, block: block.name().to_owned() });
        }
        let userfaultfd = open()?;
        let pagemap = open_pagemap()?;
        // On failure the descriptor is closed, which undoes the registrations.
        self.register(&userfaultfd, pagemap.as_fd())?;
        self.kept.clear_all();
        self.keeps.store(false, Ordering::Release);
        *running = Some(Running { userfaultfd, pagemap });
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut running = self.running.write();
        match running.take() {
            Some(running) => self.unregister(&running.userfaultfd),
            None => Ok(()),
        }
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        // Locked during the scan: stop() must not remove the protection meanwhile.
        let running = self.running.read();
        let Some(running) = &*running else {
            return Err(DirtyError::NotStarted { origin: NAME });
        };
        check_bitmaps(NAME, &self.ram, into)?;
        let began = Instant::now();
        let mut report = SyncReport::default();
        self.scan(running, |index, first, count| {
            report.newly_dirty += into.block_mut(index).add_range(first, count)
        })?;
        if self.keeps.swap(false, Ordering::AcqRel) {
            report.newly_dirty += self.take_kept(into);
        }
        // The bits are set while the kernel reports the runs. One store each is too short to be timed
        // separately.
        report.times.kernel = began.elapsed();
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        // Locked during the scan, as in a sync.
        let running = self.running.read();
        let Some(running) = &*running else {
            return Err(DirtyError::NotStarted { origin: NAME });
        };
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)?;
        let mut keeps = false;
        let found = |page: u64, count: u64| keeps |= self.keep_others(block, page, count, synced);
        let scanned = self.scan_pages(running, block, first, count, found);
        // Pages that were found before a failure are reported by no other scan.
        if keeps {
            self.keeps.store(true, Ordering::Release);
        }
        scanned
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl Drop for UffdDirtyLog {
    fn drop(&mut self) {
        // A drop cannot return an error.
        let _ = self.stop();
    }
}

/// Report and protect written pages, for which the kernel has a fast path.
///
/// It treats unmapped pages as written. After the protection with markers, there are none.
const WRITTEN_SHARED: Scan = Scan {
    flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
    all_of: PAGE_IS_WRITTEN,
    any_of: 0,
    report: PAGE_IS_WRITTEN,
};

/// The same scan, but never for absent pages.
const WRITTEN_ANONYMOUS: Scan = Scan { any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED, ..WRITTEN_SHARED };

/// Whether absent pages are protected by markers. Only anonymous memory on normal pages needs none.
fn needs_markers(block: &RamBlock) -> bool {
    block.mapping.kind() != Kind::Anonymous || block.mapping.is_huge()
}

/// Protects a newly registered block.
fn protect(fd: &OwnedFd, pagemap: BorrowedFd<'_>, block: &RamBlock) -> Result<(), (&'static str, io::Error)> {
    if !needs_markers(block) {
        let scan = Scan { all_of: 0, report: PAGE_IS_PRESENT, ..WRITTEN_ANONYMOUS };
        return sys::pagemap_scan(
            pagemap,
            block.host_address() as u64,
            block.len_bytes(),
            scan,
            |_, _, _| {},
        )
        .map_err(|error| ("ioctl(PAGEMAP_SCAN)", error));
    }
    let mut protect = uffdio_writeprotect { range: range(block), mode: MODE_WP };
    loop {
        // SAFETY: the request expects this structure; protecting changes no byte of the block.
        match unsafe { sys::ioctl(fd.as_fd(), UFFDIO_WRITEPROTECT, &mut protect) } {
            Ok(_) => return Ok(()),
            // The address space is changing; a repeated call starts again at the first byte.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
            Err(error) => return Err(("UFFDIO_WRITEPROTECT", error)),
        }
    }
}

/// Opens a userfaultfd with the needed features.
fn open() -> Result<OwnedFd, DirtyError> {
    let fd = sys::userfaultfd().map_err(unsupported("userfaultfd(2)"))?;
    let features = UFFD_FEATURE_PAGEFAULT_FLAG_WP
        | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
        | UFFD_FEATURE_WP_UNPOPULATED
        | UFFD_FEATURE_WP_ASYNC;
    let mut api = uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
    // SAFETY: the request expects this structure, which points to nothing.
    unsafe { sys::ioctl(fd.as_fd(), UFFDIO_API, &mut api) }
        .map_err(unsupported("UFFD_FEATURE_WP_ASYNC, Linux 6.7"))?;
    Ok(fd)
}

/// Opens the page table, and checks that it can be scanned.
fn open_pagemap() -> Result<OpenPagemap, DirtyError> {
    let pagemap = pagemap().map_err(unsupported(
        "it needs /proc/self/pagemap; call sterna::ram::keep_pagemap before the sandbox makes the file unreachable",
    ))?;
    let page = [0u8; 1];
    let start = page.as_ptr() as u64 >> PAGE_SHIFT << PAGE_SHIFT;
    let look = Scan { flags: 0, all_of: 0, any_of: 0, report: PAGE_IS_PRESENT };
    match sys::pagemap_scan(pagemap.as_fd(), start, 1 << PAGE_SHIFT, look, |_, _, _| {}) {
        Ok(()) => Ok(pagemap),
        Err(error) => Err(unsupported("ioctl(PAGEMAP_SCAN), Linux 6.7")(error)),
    }
}

fn range(block: &RamBlock) -> uffdio_range {
    uffdio_range { start: block.host_address() as u64, len: block.len_bytes() }
}

fn unsupported(what: &'static str) -> impl FnOnce(io::Error) -> DirtyError {
    move |source| DirtyError::Unsupported { origin: NAME, what, source }
}

fn failed(call: &'static str, block: usize, source: io::Error) -> DirtyError {
    DirtyError::System { origin: NAME, call, what: "block", index: block as u64, source }
}
