//! A dirty log that the VMM reads itself.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::{DirtyBitmaps, DirtySource, SyncReport, SyncTimes, check_bitmaps, check_rearm};
use crate::{DirtyError, GuestRam, PAGE_BYTES, PageBitmap};
use parking_lot::{Mutex, MutexGuard};

const NAME: &str = "external-log";

/// A dirty log of the VMM's own: KVM's log that it reads itself, or that of a device.
pub trait VmmLog: Send + Sync {
    /// Begins to log: every write from now on is found by [`VmmLog::read`].
    ///
    /// # Errors
    /// It cannot be logged; nothing has begun then.
    fn start(&self) -> io::Result<()>;

    /// Ends it. Also called after a [`VmmLog::read`] that failed.
    ///
    /// # Errors
    /// What could not be undone.
    fn stop(&self) -> io::Result<()>;

    /// Hands over the pages that were written since the last call, and logs their next write again. The last call
    /// comes after the guest was stopped, and must miss nothing. May hand over a page that was not written.
    ///
    /// # Errors
    /// The log cannot be read. What was handed over counts anyway.
    fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()>;
}

/// Where [`VmmLog::read`] puts what it found. Words have the first page in their lowest bit.
#[derive(Debug)]
pub struct FoundPages<'a> {
    ram: &'a GuestRam,
    into: &'a mut DirtyBitmaps,
    newly_dirty: u64,
    /// The first report that named no page of the RAM.
    refused: Option<DirtyError>,
}

impl FoundPages<'_> {
    /// The RAM that the log is over.
    pub fn ram(&self) -> &GuestRam {
        self.ram
    }

    /// Pages of a block from `first_page` on, a bit for each: as KVM_GET_DIRTY_LOG has them for a slot that maps the
    /// block from there on. Bits after the block's last page must be clear.
    pub fn words(&mut self, block: usize, first_page: u64, words: &[u64]) {
        let Some(pages) = self.ram.blocks().get(block).map(|block| block.pages()) else {
            return self.refuse(block, "there is no such block");
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

    /// Pages of guest-physical memory from `guest_address` on, a bit for each. They must lie in one block, which was
    /// told its address ([`RamBlock::at_guest_address`](crate::RamBlock::at_guest_address)).
    pub fn words_at(&mut self, guest_address: u64, words: &[u64]) {
        match self.place(guest_address) {
            Some((block, first_page)) => self.words(block, first_page, words),
            None => self.refuse(0, "no block has the guest address of a page that was found dirty"),
        }
    }

    /// Some pages of a block.
    pub fn pages(&mut self, block: usize, first: u64, count: u64) {
        match self.ram.blocks().get(block).map(|block| block.pages()) {
            Some(pages) if first.checked_add(count).is_some_and(|end| end <= pages) => {
                self.newly_dirty += self.into.block_mut(block).add_range(first, count);
            }
            Some(_) => self.refuse(block, "a page after the block's end was found dirty"),
            None => self.refuse(block, "there is no such block"),
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

/// Makes a [`VmmLog`] a dirty source.
///
/// ```
/// use std::io;
/// use std::sync::Mutex;
/// use sterna_ram::dirty::{ExternalLog, FoundPages, VmmLog};
/// use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, RamBlock};
///
/// /// Stands for a VMM that calls KVM_GET_DIRTY_LOG.
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
    /// Two who take from one log would each miss what the other took.
    reading: Mutex<()>,
}

impl<L: VmmLog> ExternalLog<L> {
    /// A source over `log`, which is that of `ram`. Not started.
    pub fn new(ram: &GuestRam, log: L) -> Self {
        Self { ram: ram.clone(), log, is_active: AtomicBool::new(false), reading: Mutex::new(()) }
    }

    /// The VMM's log.
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

    /// Reading has re-armed.
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
