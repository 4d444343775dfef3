//! The dirty log of vhost devices, as a dirty source.
//!
//! # The model
//! A vhost back end (a process with vhost-user, the kernel with vhost-net) writes guest RAM without KVM's
//! knowledge. While VHOST_F_LOG_ALL is on, it sets a bit for each page, *after* it wrote the page. The bits are
//! in shared memory that this process provides: bit `n` of byte `k` is the page at guest-physical `(8k + n) *
//! 4096`. All devices and queues may share one log.
//!
//! A sync takes words that are not zero by one atomic swap each. A bit that is set meanwhile is either in the
//! result or stays for the next sync. Syncing therefore re-arms, and [`DirtySource::rearm`] does nothing.
//! Guest-physical memory has holes, and its ranges need not begin with a word of the log. The bits of a word at
//! the border of two ranges are divided between them.
//!
//! The last sync must miss no write: make it after every back end has confirmed that its rings have stopped
//! (GET_VRING_BASE).

mod drain;
mod range;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

pub use range::LoggedRange;

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::mapping::{Backing, FileRange, Mapping};
use crate::page::PAGE_BYTES;
use drain::LogWord;

const NAME: &str = "vhost-log";

/// A dirty log in shared memory that vhost back ends fill.
///
/// Several devices can share one `VhostLog`, which is read once per sync.
#[derive(Debug)]
pub struct VhostLog {
    ram: GuestRam,
    ranges: Vec<LoggedRange>,
    memory: Mapping,
    /// The memfd that contains `memory`.
    file: Arc<File>,
    active: Mutex<bool>,
}

impl VhostLog {
    /// Makes a log that is large enough for the highest of `ranges`.
    ///
    /// The ranges map guest-physical memory to pages of `ram`. The log is not started.
    ///
    /// # Errors
    /// [`DirtyError::GuestRange`]; [`DirtyError::System`] if its memory cannot be allocated.
    pub fn new(ram: &GuestRam, ranges: Vec<LoggedRange>) -> Result<Self, DirtyError> {
        let needed_bytes = range::check(ram, &ranges)?;
        Self::build(ram, ranges, needed_bytes)
    }

    /// Makes a log of `bytes` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// [`DirtyError::LogTooSmall`] and the errors of [`VhostLog::new`].
    pub fn with_size(ram: &GuestRam, ranges: Vec<LoggedRange>, bytes: u64) -> Result<Self, DirtyError> {
        let needed_bytes = range::check(ram, &ranges)?;
        if bytes < needed_bytes {
            return Err(DirtyError::LogTooSmall { origin: NAME, log_bytes: bytes, needed_bytes });
        }
        Self::build(ram, ranges, bytes)
    }

    fn build(ram: &GuestRam, ranges: Vec<LoggedRange>, bytes: u64) -> Result<Self, DirtyError> {
        let len = bytes.max(1).checked_next_multiple_of(PAGE_BYTES);
        let len = len.and_then(|len| isize::try_from(len).ok());
        let Some(len) = len else {
            return Err(failed("mmap", io::Error::from_raw_os_error(libc::ENOMEM)));
        };
        let memory = Mapping::new("sterna-vhost-log", len as usize, Backing::Memfd)
            .map_err(|(call, source)| failed(call, source))?;
        let Some(FileRange { file, .. }) = memory.file() else {
            return Err(failed("memfd_create", io::Error::from(io::ErrorKind::NotFound)));
        };
        Ok(VhostLog { ram: ram.clone(), ranges, memory, file, active: Mutex::new(false) })
    }

    /// Returns the descriptor of the log's memory, a memfd of fixed size, for SET_LOG_BASE.
    ///
    /// For the kernel's vhost, the descriptor is mapped and the address is passed instead.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the bytes of the log, for SET_LOG_BASE.
    pub fn len_bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Returns the offset of the log in the file, for SET_LOG_BASE.
    pub fn offset(&self) -> u64 {
        0
    }

    /// Returns the address of the log in this process, for the kernel's vhost (VHOST_SET_LOG_BASE).
    ///
    /// The caller must keep the log alive while the address is in use.
    pub fn host_address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// Whether the log is started, so that back ends must log.
    pub fn is_active(&self) -> bool {
        *self.active.lock()
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, a multiple of 8 bytes, and lives as long as `self`. Any bytes
        // are valid words, and other users of the memory change it by atomic instructions.
        unsafe { slice::from_raw_parts(self.memory.address().cast(), self.memory.len() / 8) }
    }

    fn check_active(&self, active: bool) -> Result<(), DirtyError> {
        if active { Ok(()) } else { Err(DirtyError::NotStarted { origin: NAME }) }
    }
}

impl DirtySource for VhostLog {
    /// Clears the bits of earlier writes.
    ///
    /// After this, make the back ends log, and wait for their confirmation before the first page is read.
    fn start(&self) -> Result<(), DirtyError> {
        let mut active = self.active.lock();
        if *active {
            return Ok(());
        }
        // Populated now, so that the first sync does not pay for it. Linux before 5.14 does not support the
        // advice.
        match self.memory.advise(0, self.len_bytes(), libc::MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                return Err(failed("madvise(MADV_POPULATE_WRITE)", error));
            }
            _ => {}
        }
        for word in self.words() {
            if word.peek() != 0 {
                word.take();
            }
        }
        *active = true;
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        *self.active.lock() = false;
        Ok(())
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        // Locked until the end: of two concurrent syncs, each would miss the bits that the other took.
        let active = self.active.lock();
        self.check_active(*active)?;
        check_bitmaps(NAME, &self.ram, into)?;
        let mut report = SyncReport::default();
        for range in &self.ranges {
            report += range.sync(self.words(), into.block_mut(range.block));
        }
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.check_active(self.is_active())?;
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

fn failed(call: &'static str, source: io::Error) -> DirtyError {
    DirtyError::System { origin: NAME, call, what: "log", index: 0, source }
}
