//! A dirty log for writers that report their own writes: test guests, emulated devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::{SyncReport, SyncTimes};
use crate::bitmap::PageBitmap;
use crate::error::DirtyError;
use crate::guest::GuestRam;

const NAME: &str = "software-log";

/// A log that writers fill through [`SoftwareLog::mark`].
///
/// It has two phases, like KVM's manual protection: every sync reports a bit until it is re-armed.
#[derive(Debug)]
pub struct SoftwareLog {
    ram: GuestRam,
    log: DirtyBitmaps,
    active: AtomicBool,
}

impl SoftwareLog {
    /// Makes a log over all blocks of `ram`. It is not started.
    pub fn new(ram: &GuestRam) -> Self {
        SoftwareLog { ram: ram.clone(), log: DirtyBitmaps::new(ram), active: AtomicBool::new(false) }
    }

    /// Reports that a page was written. Call it *after* the write.
    ///
    /// If a sync reported the bit before the write, the page could be read too early and the write would be
    /// lost.
    ///
    /// # Panics
    /// If there is no such block or page.
    pub fn mark(&self, block: usize, page: u64) {
        self.mark_range(block, page, 1);
    }

    /// Reports that neighbouring pages were written, like [`SoftwareLog::mark`].
    ///
    /// # Panics
    /// If there is no such block or the pages are not in it.
    pub fn mark_range(&self, block: usize, first: u64, count: u64) {
        // Sequentially consistent with `start`: a writer that does not see the log active wrote before start()
        // returned, and no sync has to report that write.
        if self.active.load(Ordering::SeqCst) {
            self.log.block(block).set_range(first, count);
        }
    }
}

impl DirtySource for SoftwareLog {
    fn start(&self) -> Result<(), DirtyError> {
        if !self.active.load(Ordering::SeqCst) {
            self.log.clear_all();
            self.active.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        self.active.store(false, Ordering::SeqCst);
        self.log.clear_all();
        Ok(())
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.check_active()?;
        check_bitmaps(NAME, &self.ram, into)?;
        let began = Instant::now();
        let newly_dirty = into.or_from(&self.log);
        let times = SyncTimes { aligned: began.elapsed(), ..SyncTimes::default() };
        Ok(SyncReport { newly_dirty, times })
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.check_active()?;
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)?;
        let log = self.log.block(block).words();
        let words = (first / 64) as usize..(first + count).div_ceil(64) as usize;
        for (log, synced) in log[words.clone()].iter().zip(&synced.words()[words]) {
            let clear = synced.load(Ordering::Acquire);
            if clear != 0 {
                log.fetch_and(!clear, Ordering::AcqRel);
            }
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl SoftwareLog {
    fn check_active(&self) -> Result<(), DirtyError> {
        if self.active.load(Ordering::SeqCst) { Ok(()) } else { Err(DirtyError::NotStarted { origin: NAME }) }
    }
}
