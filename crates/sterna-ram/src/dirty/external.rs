//! Dirty logs that the VMM reads itself, as dirty sources.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::{SyncReport, SyncTimes};
use crate::bitmap::PageBitmap;
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::page::PAGE_BYTES;
use parking_lot::{Mutex, MutexGuard};

const NAME: &str = "external-log";

/// A dirty log that the VMM reads: KVM's log, or the log of a device.
pub trait VmmLog: Send + Sync {
    /// Begins to log: [`VmmLog::read`] reports every write from now on.
    ///
    /// # Errors
    /// Logging cannot start; nothing is logged then.
    fn start(&self) -> io::Result<()>;

    /// Ends logging. The engine also calls it after a failed [`VmmLog::read`].
    ///
    /// # Errors
    /// A part of the logging could not be ended.
    fn stop(&self) -> io::Result<()>;

    /// Reports the pages written since the last call, and logs their next write again.
    ///
    /// The last call is made after the guest was stopped, and must report every write. A page that was not
    /// written may be reported, too.
    ///
    /// # Errors
    /// The log cannot be read. Pages that were reported before the error still count.
    fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()>;
}

/// Receives the pages that [`VmmLog::read`] found. In a word, the lowest bit is the first page.
#[derive(Debug)]
pub struct FoundPages<'a> {
    ram: &'a GuestRam,
    into: &'a mut DirtyBitmaps,
    newly_dirty: u64,
    /// The first error: a reported page that the RAM does not have.
    refused: Option<DirtyError>,
}

impl FoundPages<'_> {
    /// Returns the RAM of the log.
    pub fn ram(&self) -> &GuestRam {
        self.ram
    }

    /// Reports the set bits of `words` as pages of `block`, starting at `first_page`.
    ///
    /// This is the format of KVM_GET_DIRTY_LOG for a slot that maps the block from that page on. Bits after the
    /// block's last page must be clear.
    pub fn words(&mut self, block: usize, first_page: u64, words: &[u64]) {
        let Some(pages) = self.ram.blocks().get(block).map(|block| block.pages()) else {
            return self.refuse(block, "the block does not exist");
        };
        let room = pages.saturating_sub(first_page);
        let is_inside = |(index, word): (usize, &u64)| {
            let below = room.saturating_sub(index as u64 * 64);
            *word == 0 || below >= 64 || *word >> below == 0
        };
        if !words.iter().enumerate().all(is_inside) {
            return self.refuse(block, "a page after the block's end was found dirty");
        }
        let words = &words[..words.len().min(room.div_ceil(64) as usize)];
        if !words.is_empty() {
            self.newly_dirty += self.into.block_mut(block).merge_words(first_page, words);
        }
    }

    /// Reports the set bits of `words` as pages of guest-physical memory, starting at `guest_address`.
    ///
    /// The pages must be in one block, whose address was stated
    /// ([`RamBlock::at_guest_address`](crate::RamBlock::at_guest_address)).
    pub fn words_at(&mut self, guest_address: u64, words: &[u64]) {
        match self.place(guest_address) {
            Some((block, first_page)) => self.words(block, first_page, words),
            None => self.refuse(0, "no block has the guest address of a page that was found dirty"),
        }
    }

    /// Reports `count` pages of a block from `first` on.
    pub fn pages(&mut self, block: usize, first: u64, count: u64) {
        match self.ram.blocks().get(block).map(|block| block.pages()) {
            Some(pages) if first.checked_add(count).is_some_and(|end| end <= pages) => {
                self.newly_dirty += self.into.block_mut(block).add_range(first, count);
            }
            Some(_) => self.refuse(block, "a page after the block's end was found dirty"),
            None => self.refuse(block, "the block does not exist"),
        }
    }

    /// Reports every page that has at least one of the `bytes` bytes from `guest_address` on.
    ///
    /// Address and length need not be multiples of a page. The bytes must be in one block, whose address was stated
    /// ([`RamBlock::at_guest_address`](crate::RamBlock::at_guest_address)). 0 bytes report no page.
    pub fn pages_at(&mut self, guest_address: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let before = guest_address % PAGE_BYTES;
        match self.place(guest_address - before) {
            Some((block, first)) => match before.checked_add(bytes) {
                Some(length) => self.pages(block, first, length.div_ceil(PAGE_BYTES)),
                None => self.refuse(block, "a page after the block's end was found dirty"),
            },
            None => self.refuse(0, "no block has the guest address of a page that was found dirty"),
        }
    }

    fn place(&self, guest_address: u64) -> Option<(usize, u64)> {
        self.ram.blocks().iter().enumerate().find_map(|(index, block)| {
            let offset = guest_address.checked_sub(block.guest_address()?)?;
            (offset < block.len_bytes() && offset % PAGE_BYTES == 0).then_some((index, offset / PAGE_BYTES))
        })
    }

    fn refuse(&mut self, block: usize, rule: &'static str) {
        self.refused.get_or_insert(DirtyError::Range { origin: NAME, block, rule });
    }
}

/// A dirty source over a [`VmmLog`].
///
/// ```
/// use std::io;
/// use std::sync::Mutex;
/// use sterna_ram::dirty::{ExternalLog, FoundPages, VmmLog};
/// use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, RamBlock};
///
/// /// Represents a VMM that calls KVM_GET_DIRTY_LOG.
/// struct Slot(Mutex<Vec<u64>>);
///
/// impl VmmLog for Slot {
///     fn start(&self) -> io::Result<()> {
///         Ok(()) // sets KVM_MEM_LOG_DIRTY_PAGES
///     }
///     fn stop(&self) -> io::Result<()> {
///         Ok(())
///     }
///     fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()> {
///         let mut log = self.0.lock().unwrap();
///         found.words_at(4 << 30, &log);
///         log.fill(0);
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ram = GuestRam::new(vec![RamBlock::new("ram", 1 << 20, Backing::Memfd)?.at_guest_address(4 << 30)])?;
/// let source = ExternalLog::new(&ram, Slot(Mutex::new(vec![0b101, 0, 0, 0])));
///
/// source.start()?;
/// let mut dirty = DirtyBitmaps::new(&ram);
/// assert_eq!(source.sync(&mut dirty)?.newly_dirty, 2);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ExternalLog<L> {
    ram: GuestRam,
    log: L,
    is_active: AtomicBool,
    /// Serializes reads: of two concurrent readers, each would miss the pages that the other took.
    reading: Mutex<()>,
}

impl<L: VmmLog> ExternalLog<L> {
    /// Makes a source over `log`, which logs the writes to `ram`. It is not started.
    pub fn new(ram: &GuestRam, log: L) -> Self {
        Self { ram: ram.clone(), log, is_active: AtomicBool::new(false), reading: Mutex::new(()) }
    }

    /// Returns the VMM's log.
    pub fn log(&self) -> &L {
        &self.log
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.reading.lock()
    }

    fn check_active(&self) -> Result<(), DirtyError> {
        let is_active = self.is_active.load(Ordering::Acquire);
        is_active.then_some(()).ok_or(DirtyError::NotStarted { origin: NAME })
    }
}

impl<L: VmmLog> DirtySource for ExternalLog<L> {
    fn start(&self) -> Result<(), DirtyError> {
        let _turn = self.turn();
        if !self.is_active.load(Ordering::Acquire) {
            self.log.start().map_err(failed("VmmLog::start"))?;
            self.is_active.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let _turn = self.turn();
        match self.is_active.swap(false, Ordering::AcqRel) {
            true => self.log.stop().map_err(failed("VmmLog::stop")),
            false => Ok(()),
        }
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let _turn = self.turn();
        self.check_active()?;
        check_bitmaps(NAME, &self.ram, into)?;
        let began = Instant::now();
        let mut found = FoundPages { ram: &self.ram, into, newly_dirty: 0, refused: None };
        self.log.read(&mut found).map_err(failed("VmmLog::read"))?;
        match found.refused {
            Some(error) => Err(error),
            None => {
                let times = SyncTimes { kernel: began.elapsed(), ..SyncTimes::default() };
                Ok(SyncReport { newly_dirty: found.newly_dirty, times })
            }
        }
    }

    /// Does nothing more than its checks, because reading the log re-arms.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.check_active()?;
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> DirtyError {
    move |source| DirtyError::System { origin: NAME, call, what: "log", index: 0, source }
}
