//! userfaultfd write protection, resolved by the kernel itself (WP_ASYNC), synced by PAGEMAP_SCAN.
//!
//! A protected page's first write lifts the protection without waking anybody. A scan reports pages that
//! are not protected and protects them in the same step, so syncing re-arms. It sees the writes of
//! this process's threads, of the kernel on their behalf and of KVM; writes through another mapping of a
//! memfd (a vhost-user device) it does not see.
//!
//! Re-arming scans once more: what was written since the sync to pages that are about to be read need not
//! be reported, and would else be sent twice. What such a scan finds of other pages is kept for the next
//! sync.
//!
//! Memory of the VMM is tracked only where its permissions allow userfaultfd.
//!
//! At the start shared memory is protected whole, pages that are not mapped here included (markers in
//! the page table, eight bytes a page). In anonymous memory a page that is not there needs no marker:
//! when it comes, it comes unprotected, and so as written. That keeps a sparse guest sparse and lets
//! [`crate::RamBlock::mark_absent`], which asks the same page table, see what is absent.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
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

use super::{DirtyBitmaps, DirtySource, SyncReport, check_bitmaps, check_rearm};
use crate::mapping::Kind;
use crate::sys::{self, Scan};
use crate::{DirtyError, GuestRam, PAGE_SHIFT, PageBitmap, RamBlock};

const NAME: &str = "userfaultfd";

/// `UFFDIO_WRITEPROTECT_MODE_WP`, which the headers define in a way that bindings miss.
const MODE_WP: u64 = 1;

/// Tracks writes by userfaultfd; needs Linux 6.7 and no privilege.
#[derive(Debug)]
pub struct UffdDirtyLog {
    ram: GuestRam,
    running: RwLock<Option<OwnedFd>>,
    /// Found while re-arming other pages, and in no sync yet.
    kept: DirtyBitmaps,
    /// Whether there is anything in it.
    keeps: AtomicBool,
}

impl UffdDirtyLog {
    /// Tracks all blocks. Not started.
    pub fn new(ram: GuestRam) -> Self {
        let kept = DirtyBitmaps::new(&ram);
        UffdDirtyLog { ram, running: RwLock::new(None), kept, keeps: AtomicBool::new(false) }
    }

    /// Whether this machine's kernel can do it.
    pub fn is_supported() -> bool {
        open().is_ok() && scan_exists()
    }

    /// Makes the system calls of a sync and forgets what they report, which is lost then: for benches, to
    /// see what a sync costs beyond them.
    ///
    /// # Errors
    /// As [`DirtySource::sync`].
    #[cfg(feature = "bench")]
    pub fn system_calls_alone(&self) -> Result<(), DirtyError> {
        let running = self.running.read();
        if running.is_none() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        self.scan(|_, _, _| {})
    }

    /// Scans all blocks, and protects again what was written: `each(block, first page, pages)`.
    fn scan(&self, mut each: impl FnMut(usize, u64, u64)) -> Result<(), DirtyError> {
        for (index, block) in self.ram.blocks().iter().enumerate() {
            self.scan_pages(index, 0, block.pages(), |first, count| each(index, first, count))?;
        }
        Ok(())
    }

    /// The same for some pages of a block, which must have them: `each(first page, pages)`.
    fn scan_pages(
        &self,
        index: usize,
        first: u64,
        count: u64,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), DirtyError> {
        let block = self.ram.block(index);
        let scan = if needs_markers(block) { WRITTEN_SHARED } else { WRITTEN_ANONYMOUS };
        let start = block.host_address() as u64 + (first << PAGE_SHIFT);
        sys::pagemap_scan(start, count << PAGE_SHIFT, scan, |at, bytes, _| {
            each(first + (at >> PAGE_SHIFT), bytes >> PAGE_SHIFT);
        })
        .map_err(|source| failed("ioctl(PAGEMAP_SCAN)", index, source))
    }

    /// Keeps those of some written pages that are not `about_to_be_read`; gives whether there were any.
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

    /// Moves what was kept; gives how many bits were clear there.
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

    fn register(&self, fd: &OwnedFd) -> Result<(), DirtyError> {
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let mut register =
                uffdio_register { range: range(block), mode: u64::from(UFFDIO_REGISTER_MODE_WP), ioctls: 0 };
            // SAFETY: the request expects this structure; registering changes no byte of the block.
            unsafe { sys::ioctl(fd.as_fd(), UFFDIO_REGISTER, &mut register) }
                .map_err(|source| failed("UFFDIO_REGISTER", index, source))?;
            protect(fd, block).map_err(|(call, source)| failed(call, index, source))?;
        }
        Ok(())
    }

    /// Unregisters what is registered; goes on after an error and gives the first.
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
        let fd = open()?;
        if !scan_exists() {
            return Err(unsupported("ioctl(PAGEMAP_SCAN), Linux 6.7")(io::Error::from_raw_os_error(
                libc::ENOTTY,
            )));
        }
        // On failure the descriptor is closed, which undoes what was registered.
        self.register(&fd)?;
        self.kept.clear_all();
        self.keeps.store(false, Ordering::Release);
        *running = Some(fd);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut running = self.running.write();
        match running.take() {
            Some(fd) => self.unregister(&fd),
            None => Ok(()),
        }
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        // Held while scanning: stop() must not lift the protection half-way.
        let running = self.running.read();
        if running.is_none() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        check_bitmaps(NAME, &self.ram, into)?;
        let began = Instant::now();
        let mut report = SyncReport::default();
        self.scan(|index, first, count| report.newly_dirty += into.block_mut(index).add_range(first, count))?;
        if self.keeps.swap(false, Ordering::AcqRel) {
            report.newly_dirty += self.take_kept(into);
        }
        // The bits are set as the kernel reports the runs: a store each, which no clock could single out.
        report.times.kernel = began.elapsed();
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        // Held while scanning, as in a sync.
        let running = self.running.read();
        if running.is_none() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)?;
        let mut keeps = false;
        let found = |page: u64, count: u64| keeps |= self.keep_others(block, page, count, synced);
        let scanned = self.scan_pages(block, first, count, found);
        // Also what was found before a failure is reported nowhere else.
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
        // No caller is left to report an error to.
        let _ = self.stop();
    }
}

/// Report and protect. The kernel has a quick way for exactly this; it takes pages that are not mapped
/// for written, of which there are none after everything was protected with markers.
const WRITTEN_SHARED: Scan = Scan {
    flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
    all_of: PAGE_IS_WRITTEN,
    any_of: 0,
    report: PAGE_IS_WRITTEN,
};

/// The same, but never for pages that are not there.
const WRITTEN_ANONYMOUS: Scan = Scan { any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED, ..WRITTEN_SHARED };

/// Whether pages that are not there are protected by markers: all but anonymous memory on normal pages.
fn needs_markers(block: &RamBlock) -> bool {
    block.mapping.kind() != Kind::Anonymous || block.mapping.is_huge()
}

/// Protects a block that was just registered.
fn protect(fd: &OwnedFd, block: &RamBlock) -> Result<(), (&'static str, io::Error)> {
    if !needs_markers(block) {
        let scan = Scan { all_of: 0, report: PAGE_IS_PRESENT, ..WRITTEN_ANONYMOUS };
        return sys::pagemap_scan(block.host_address() as u64, block.len_bytes(), scan, |_, _, _| {})
            .map_err(|error| ("ioctl(PAGEMAP_SCAN)", error));
    }
    let mut protect = uffdio_writeprotect { range: range(block), mode: MODE_WP };
    loop {
        // SAFETY: the request expects this structure; protecting changes no byte of the block.
        match unsafe { sys::ioctl(fd.as_fd(), UFFDIO_WRITEPROTECT, &mut protect) } {
            Ok(_) => return Ok(()),
            // The address space is just changing; it begins anew.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
            Err(error) => return Err(("UFFDIO_WRITEPROTECT", error)),
        }
    }
}

/// A userfaultfd with the features that are needed.
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

fn scan_exists() -> bool {
    let page = [0u8; 1];
    let start = page.as_ptr() as u64 >> PAGE_SHIFT << PAGE_SHIFT;
    let look = Scan { flags: 0, all_of: 0, any_of: 0, report: PAGE_IS_PRESENT };
    sys::pagemap_scan(start, 1 << PAGE_SHIFT, look, |_, _, _| {}).is_ok()
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
