//! The pages that come while the guest runs: which are missing, and how each is placed once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna_ram::missing_pages::{Fault, MissingPages, MissingPagesError};
use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SHIFT, PAGE_SIZE};

use super::blocktime::Blocktime;
use crate::error::MigrationError;

/// Huge pages of which some has come. A source sends those that are asked for whole, and the others one after the other.
const HALF_HUGE_PAGES: usize = 16;

impl From<MissingPagesError> for MigrationError {
    fn from(error: MissingPagesError) -> Self {
        Self::Ram(error.to_string())
    }
}

/// What is missing, and where it goes.
pub(crate) struct ArrivingPages {
    ram: GuestRam,
    kernel: MissingPages,
    /// Not in place. A bit goes only after its page is.
    lacking: DirtyBitmaps,
    /// What came: each page comes once.
    arrived: DirtyBitmaps,
    /// What was asked for.
    requested: DirtyBitmaps,
    left: AtomicU64,
    /// Huge pages of which some has come, by block and first page.
    half: Mutex<HashMap<(usize, u64), Half>>,
    blocktime: Option<Blocktime>,
}

/// A huge page of which some has come.
struct Half {
    content: Vec<u8>,
    missing: u64,
}

impl ArrivingPages {
    /// Takes the pages away that did not come, and from now on holds whoever touches one. `received`: pages that came.
    pub(crate) fn begin(
        ram: &GuestRam,
        received: &DirtyBitmaps,
        measures: bool,
    ) -> Result<Self, MigrationError> {
        let kernel = MissingPages::new(ram)?;
        let lacking = DirtyBitmaps::new(ram);
        lacking.set_all();
        for (index, block) in ram.blocks().iter().enumerate() {
            let lacking = lacking.block(index);
            for (lacks, came) in lacking.words().iter().zip(received.block(index).words()) {
                lacks.fetch_and(!came.load(Ordering::Acquire), Ordering::AcqRel);
            }
            let unit = block.page_bytes() >> PAGE_SHIFT;
            let mut from = 0;
            while let Some(run) = lacking.next_run(from, lacking.pages(), u64::MAX) {
                // Whole pages of the memory below: the source was told of their size, and drops whole ones.
                let (first, end) = (run.first / unit * unit, run.end().next_multiple_of(unit));
                lacking.set_range(first, end - first);
                kernel.take_away(index, first, end - first)?;
                from = end;
            }
        }
        kernel.register()?;
        Ok(Self {
            left: AtomicU64::new(lacking.count()),
            kernel,
            lacking,
            arrived: DirtyBitmaps::new(ram),
            requested: DirtyBitmaps::new(ram),
            half: Mutex::default(),
            blocktime: measures.then(Blocktime::default),
            ram: ram.clone(),
        })
    }

    /// What measures how long is waited.
    pub(crate) fn blocktime(&self) -> Option<&Blocktime> {
        self.blocktime.as_ref()
    }

    /// Pages that are missing.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// Waits for threads that touch a page that is not there.
    pub(crate) fn wait(&self, faults: &mut Vec<Fault>) -> Result<bool, MigrationError> {
        Ok(self.kernel.wait(faults)?)
    }

    /// A thread waits. True: its page is to be asked for.
    pub(crate) fn wants(&self, fault: &Fault) -> Result<bool, MigrationError> {
        let Fault { block, first, count, .. } = *fault;
        if self.is_here(fault) {
            // It came as zero, or was given back since: it reads as zero.
            if !self.kernel.place_zeros(block, first, count)? {
                self.kernel.wake(block, first, count)?;
            }
            return Ok(false);
        }
        if let Some(blocktime) = &self.blocktime {
            blocktime.waits(fault);
            // It may have come in between.
            if self.is_here(fault) {
                blocktime.came(block, first);
            }
        }
        Ok(self.requested.block(block).set_range(first, count) > 0)
    }

    fn is_here(&self, fault: &Fault) -> bool {
        let end = fault.first + fault.count;
        self.lacking.block(fault.block).next_run(fault.first, end, 1).is_none()
    }

    /// A page has come.
    pub(crate) fn page(&self, block: usize, page: u64, content: &[u8]) -> Result<(), MigrationError> {
        self.comes(block, page)?;
        let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
        if unit > 1 {
            return self.part(block, page, unit, Some(content));
        }
        let is_new = self.kernel.place(block, page, content)?;
        self.placed(block, page, 1, is_new)
    }

    /// A page has come that is zero.
    pub(crate) fn zero(&self, block: usize, page: u64) -> Result<(), MigrationError> {
        self.comes(block, page)?;
        let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
        if unit > 1 {
            return self.part(block, page, unit, None);
        }
        let is_new = self.kernel.place_zeros(block, page, 1)?;
        self.placed(block, page, 1, is_new)
    }

    /// Everybody goes on: all pages are in place, or no guest runs.
    pub(crate) fn end(&self) {
        self.kernel.end();
        self.kernel.stop_waiting();
    }

    /// Each page comes once, and only if it is missing.
    fn comes(&self, block: usize, page: u64) -> Result<(), MigrationError> {
        let why = if !self.lacking.block(block).get(page) && !self.arrived.block(block).get(page) {
            "was not missing"
        } else if self.arrived.block(block).set_range(page, 1) == 0 {
            "came twice"
        } else {
            return Ok(());
        };
        let (offset, name) = (page << PAGE_SHIFT, self.ram.block(block).name());
        let what = format!("page {offset:#x} of block {name:?} {why} (specs/postcopy.md §3)");
        Err(MigrationError::PeerMisbehaved { what })
    }

    /// Keeps a part of a huge page; with its last part it is placed. `None`: zeros.
    fn part(&self, block: usize, page: u64, unit: u64, content: Option<&[u8]>) -> Result<(), MigrationError> {
        let first = page / unit * unit;
        let bytes = (unit as usize) << PAGE_SHIFT;
        let mut half = self.half.lock();
        if !half.contains_key(&(block, first)) && half.len() >= HALF_HUGE_PAGES {
            let what = format!("more than {HALF_HUGE_PAGES} huge pages came in parts at once");
            return Err(MigrationError::PeerMisbehaved { what });
        }
        let new = || Half { content: vec![0; bytes], missing: unit };
        let kept = half.entry((block, first)).or_insert_with(new);
        if let Some(content) = content {
            let at = ((page - first) as usize) << PAGE_SHIFT;
            kept.content[at..at + PAGE_SIZE].copy_from_slice(content);
        }
        kept.missing -= 1;
        if kept.missing > 0 {
            return Ok(());
        }
        let whole = half.remove(&(block, first));
        drop(half);
        let Some(whole) = whole else { return Ok(()) };
        let is_new = self.kernel.place(block, first, &whole.content)?;
        self.placed(block, first, unit, is_new)
    }

    fn placed(&self, block: usize, first: u64, count: u64, is_new: bool) -> Result<(), MigrationError> {
        if !is_new {
            let (offset, name) = (first << PAGE_SHIFT, self.ram.block(block).name());
            let what =
                format!("page {offset:#x} of block {name:?} was missing, and somebody else has filled it");
            return Err(MigrationError::Ram(what));
        }
        let cleared = self.lacking.block(block).clear_range(first, count);
        self.left.fetch_sub(cleared, Ordering::AcqRel);
        if let Some(blocktime) = &self.blocktime {
            blocktime.came(block, first);
        }
        Ok(())
    }
}
