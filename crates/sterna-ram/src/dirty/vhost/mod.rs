//! The log of vhost devices.
//!
//! # The model
//! A vhost back end (a process with vhost-user, the kernel with vhost-net) writes guest RAM behind KVM's
//! back. While VHOST_F_LOG_ALL is on, it sets a bit for each page that it wrote, *after* writing it, in
//! shared memory that we gave it: bit `n` of byte `k` is the page at guest-physical `(8k + n) * 4096`. All
//! devices and queues may share one log.
//!
//! A sync takes words that are not zero by one atomic swap each: a bit that is set meanwhile is in what
//! was taken or stays for the next time. So syncing re-arms, and [`DirtySource::rearm`] has nothing to
//! do. Guest-physical memory has holes, and its ranges need not begin with a word of the log: a word at
//! the border of two ranges gives each of them its own bits.
//!
//! The sync that must miss nothing is the last one: make it after every back end has said that its
//! rings have stopped (GET_VRING_BASE).

mod drain;
mod range;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

#[cfg(loom)]
pub use drain::{LogWord, drain_words};
pub use range::LoggedRange;

use super::{DirtyBitmaps, DirtySource, SyncReport, check_bitmaps, check_rearm};
use crate::mapping::{Backing, FileRange, Mapping};
use crate::{DirtyError, GuestRam, PAGE_BYTES, PageBitmap};
#[cfg(not(loom))]
use drain::LogWord;

const NAME: &str = "vhost-log";

/// A dirty log in shared memory, which vhost back ends fill. To share it among devices, share this; it is
/// read once per sync, however many fill it.
#[derive(Debug)]
pub struct VhostLog {
    ram: GuestRam,
    ranges: Vec<LoggedRange>,
    memory: Mapping,
    /// Of the memory.
    file: Arc<File>,
    active: Mutex<bool>,
}

impl VhostLog {
    /// A log as large as the highest of `ranges` needs, which say where the guest sees which pages of
    /// `ram`. Not started.
    ///
    /// # Errors
    /// [`DirtyError::GuestRange`]; [`DirtyError::System`] if there is no memory for it.
    pub fn new(ram: &GuestRam, ranges: Vec<LoggedRange>) -> Result<Self, DirtyError> {
        let needed_bytes = range::check(ram, &ranges)?;
        Self::build(ram, ranges, needed_bytes)
    }

    /// As [`VhostLog::new`], of a size that was agreed on (in bytes, rounded up to whole pages).
    ///
    /// # Errors
    /// [`DirtyError::LogTooSmall`] and those of [`VhostLog::new`].
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

    /// The memory's descriptor, a memfd that can neither grow nor shrink, for SET_LOG_BASE (or, for the
    /// kernel's vhost, to be mapped where its address is told).
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes of the log, for SET_LOG_BASE.
    pub fn len_bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Where in the file the log begins, for SET_LOG_BASE.
    pub fn offset(&self) -> u64 {
        0
    }

    /// Where this process has it, for the kernel's vhost (VHOST_SET_LOG_BASE). Keep the log alive for as
    /// long as the address is used.
    pub fn host_address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// Whether it is started: back ends are to log.
    pub fn is_active(&self) -> bool {
        *self.active.lock()
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, a multiple of 8 bytes, and lives as long as `self`. Any bytes
        // are valid words; who else has the memory changes it by atomic instructions.
        unsafe { slice::from_raw_parts(self.memory.address().cast(), self.memory.len() / 8) }
    }

    fn check_active(&self, active: bool) -> Result<(), DirtyError> {
        if active { Ok(()) } else { Err(DirtyError::NotStarted { origin: NAME }) }
    }
}

impl DirtySource for VhostLog {
    /// Clears the log. Tell the back ends to log after this, and take their word that they do before the
    /// first page is read.
    fn start(&self) -> Result<(), DirtyError> {
        let mut active = self.active.lock();
        if *active {
            return Ok(());
        }
        // Or the first sync would pay for it. Linux before 5.14 does not know the advice.
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
        // Held to the end: two who take from one log would each miss what the other took.
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
