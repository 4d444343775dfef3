//! The pages that come while the guest runs: which are missing, and how each is placed once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use sterna_ram::missing_pages::{Fault, MissingPages, MissingPagesError, TakenAhead};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SHIFT, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_wire::received_pages::ReceivedPages;

use super::blocktime::Blocktime;
use super::failures::Failures;
use super::ways::{Way, Ways};
use crate::error::MigrationError;
use crate::order::PageRun;

/// Huge pages of which some has come, if they have at most so many bytes. A source sends those that are asked for whole, and the others
/// one after the other.
const HALF_HUGE_PAGES: usize = 16;
/// So many more for each lane.
const HALF_HUGE_PAGES_OF_A_LANE: usize = 2;
/// Larger ones take memory that a host may not have: one on the main channel, one on the preempt channel, and one on each lane.
const SMALL_HUGE_PAGE_BYTES: u64 = 2 << 20;
const HALF_LARGE_PAGES: usize = 2;

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
    /// What came, and is placed by who has set its bit: each page comes once.
    arrived: DirtyBitmaps,
    /// Where lanes bring pages, too: one that was asked for comes once more.
    ways: Option<Ways>,
    /// What was asked for.
    requested: DirtyBitmaps,
    left: AtomicU64,
    began: Instant,
    /// When the last page was in place.
    complete: OnceLock<Instant>,
    /// Huge pages of which some has come, by block and first page.
    half: Mutex<HashMap<(usize, u64), SharedHalf>>,
    lanes: usize,
    blocktime: Option<Blocktime>,
    failures: Mutex<Failures>,
}

/// Takes away what is lacking, but for what is away already.
fn take_away(
    kernel: &MissingPages,
    ram: &GuestRam,
    lacking: &DirtyBitmaps,
    ahead: Option<&TakenAhead>,
) -> Result<(), MigrationError> {
    let mut here = DirtyBitmaps::new(ram);
    here.or_from(lacking);
    for (index, block) in ram.blocks().iter().enumerate() {
        let here = here.block(index);
        if let Some(away) = ahead.and_then(|ahead| ahead.still_away(index)) {
            remove(here, away);
        }
        let unit = block.page_bytes() >> PAGE_SHIFT;
        let mut from = 0;
        while let Some(run) = here.next_run(from, here.pages(), u64::MAX) {
            // Whole pages of the memory below: the source was told of their size, and drops whole ones.
            let (first, end) = (run.first / unit * unit, run.end().next_multiple_of(unit));
            kernel.take_away(index, first, end - first)?;
            from = end;
        }
    }
    Ok(())
}

fn remove(pages: &PageBitmap, others: &PageBitmap) {
    for (pages, others) in pages.words().iter().zip(others.words()) {
        pages.fetch_and(!others.load(Ordering::Acquire), Ordering::AcqRel);
    }
}

/// Ways to it: the main and the preempt channel, and lanes.
type SharedHalf = Arc<Mutex<Half>>;

/// A huge page of which some has come.
struct Half {
    content: RamBlock,
    missing: u64,
}

impl ArrivingPages {
    /// Takes the pages away that did not come, and from now on holds whoever touches one. `received`: pages that came; `ahead`: what was
    /// taken away before; `lanes`: how many bring pages, too.
    pub(crate) fn begin(
        ram: &GuestRam,
        received: &DirtyBitmaps,
        ahead: Option<&TakenAhead>,
        measures: bool,
        lanes: usize,
    ) -> Result<Self, MigrationError> {
        let kernel = MissingPages::new(ram)?;
        let lacking = DirtyBitmaps::new(ram);
        lacking.set_all();
        for (lacking, received) in lacking.blocks().iter().zip(received.blocks()) {
            remove(lacking, received);
        }
        // First: a page that is away then stays away.
        kernel.register()?;
        take_away(&kernel, ram, &lacking, ahead).inspect_err(|_| kernel.end())?;
        let left = lacking.count();
        let began = Instant::now();
        Ok(Self {
            left: AtomicU64::new(left),
            began,
            complete: if left == 0 { OnceLock::from(began) } else { OnceLock::new() },
            kernel,
            lacking,
            arrived: DirtyBitmaps::new(ram),
            ways: (lanes > 0).then(|| Ways::new(ram)),
            lanes,
            requested: DirtyBitmaps::new(ram),
            half: Mutex::default(),
            blocktime: measures.then(Blocktime::default),
            failures: Mutex::default(),
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

    /// When pages could be waited for first.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// When the last page was in place.
    pub(crate) fn complete(&self) -> Option<Instant> {
        self.complete.get().copied()
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
                blocktime.came(block, first, count);
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
        self.noting(block, page, || match self.comes(Way::Main, block, page)? {
            true => self.put(block, page, 1, Some(content)),
            false => Ok(()),
        })
    }

    /// A page has come that is zero.
    pub(crate) fn zero(&self, block: usize, page: u64) -> Result<(), MigrationError> {
        self.noting(block, page, || match self.comes(Way::Main, block, page)? {
            true => self.put(block, page, 1, None),
            false => Ok(()),
        })
    }

    /// Pages have come on a lane. `None`: they are zero.
    pub(crate) fn on_lane(&self, run: PageRun, content: Option<&[u8]>) -> Result<(), MigrationError> {
        self.noting(run.block, run.first, || self.run_on_lane(run, content))
    }

    fn run_on_lane(&self, run: PageRun, content: Option<&[u8]>) -> Result<(), MigrationError> {
        let bytes = |page: u64| ((page - run.first) as usize) << PAGE_SHIFT;
        let mut first = run.first;
        while first < run.end() {
            // Those side by side that did not come on the other way. What this side is to place it places, whatever follows.
            let mut comes = Ok(true);
            let mut end = first;
            while end < run.end() {
                comes = self.comes(Way::Lane, run.block, end);
                match comes {
                    Ok(true) => end += 1,
                    Ok(false) | Err(_) => break,
                }
            }
            if end > first {
                let content = content.map(|content| &content[bytes(first)..bytes(end)]);
                self.put(run.block, first, end - first, content)?;
            }
            comes?;
            first = end + 1;
        }
        Ok(())
    }

    /// The connection was lost, and another one has come; no page comes meanwhile. What came of huge pages in part comes again.
    /// Lanes bring nothing any more.
    pub(crate) fn begin_recovery(&self) {
        self.half.lock().clear();
        if let Some(ways) = &self.ways {
            ways.end();
        }
        for (arrived, lacking) in self.arrived.blocks().iter().zip(self.lacking.blocks()) {
            remove(arrived, lacking);
        }
    }

    /// Whether a page could not be placed that could not be placed before.
    pub(crate) fn fails_again(&self) -> bool {
        self.failures.lock().is_again()
    }

    /// An operator lets the source connect again.
    pub(crate) fn forget_failures(&self) {
        self.failures.lock().forget();
    }

    /// Notes the page if that fails.
    fn noting(
        &self,
        block: usize,
        page: u64,
        place: impl FnOnce() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        place().inspect_err(|_| {
            let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
            self.failures.lock().note((block, page / unit * unit));
        })
    }

    /// Pages of a block that are in place.
    pub(crate) fn received(&self, block: usize) -> ReceivedPages {
        let lacking = self.lacking.block(block);
        let mut received = ReceivedPages::none(lacking.pages());
        (0..lacking.pages()).filter(|page| !lacking.get(*page)).for_each(|page| received.add(page));
        received
    }

    /// What was asked for and is missing: block, first page and count, each a whole page of the memory below.
    pub(crate) fn wanted(&self) -> Vec<(usize, u64, u64)> {
        let mut wanted = Vec::new();
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let unit = block.page_bytes() >> PAGE_SHIFT;
            let (requested, lacking) = (self.requested.block(index), self.lacking.block(index));
            let mut from = 0;
            while let Some(run) = requested.next_run(from, requested.pages(), 1) {
                let first = run.first / unit * unit;
                if lacking.get(first) {
                    wanted.push((index, first, unit));
                }
                from = first + unit;
            }
        }
        wanted
    }

    /// Everybody goes on: all pages are in place, or no guest runs.
    pub(crate) fn end(&self) {
        self.kernel.end();
        self.kernel.stop_waiting();
    }

    /// Each page comes once, and only if it is missing; with lanes it comes once more if it was asked for. True: it is to be placed now.
    fn comes(&self, way: Way, block: usize, page: u64) -> Result<bool, MigrationError> {
        let ways = self.ways.as_ref().filter(|ways| !ways.are_over());
        let is_first_on_way = ways.is_none_or(|ways| ways.is_first(way, block, page));
        let why = if !self.lacking.block(block).get(page) && !self.arrived.block(block).get(page) {
            "was not missing"
        } else if is_first_on_way && self.arrived.block(block).set_range(page, 1) > 0 {
            return Ok(true);
        } else if ways.is_some() && is_first_on_way && self.requested.block(block).get(page) {
            return Ok(false);
        } else {
            "came twice"
        };
        let (offset, name) = (page << PAGE_SHIFT, self.ram.block(block).name());
        let what = format!("page {offset:#x} of block {name:?} {why} (specs/postcopy.md §3)");
        Err(MigrationError::PeerMisbehaved { what })
    }

    /// Puts pages in place, which came together. `None`: zeros.
    fn put(
        &self,
        block: usize,
        first: u64,
        count: u64,
        content: Option<&[u8]>,
    ) -> Result<(), MigrationError> {
        let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
        if unit > 1 {
            return (0..count).try_for_each(|index| {
                let at = (index as usize) << PAGE_SHIFT;
                self.part(block, first + index, unit, content.map(|content| &content[at..at + PAGE_SIZE]))
            });
        }
        let is_new = match content {
            Some(content) => self.kernel.place(block, first, content)?,
            None => self.kernel.place_zeros(block, first, count)?,
        };
        self.placed(block, first, count, is_new)
    }

    /// Keeps a part of a huge page; with its last part it is placed. `None`: zeros.
    fn part(&self, block: usize, page: u64, unit: u64, content: Option<&[u8]>) -> Result<(), MigrationError> {
        let first = page / unit * unit;
        let kept = self.half(block, first, unit)?;
        // Copied under the huge page's own lock: no page that is waited for waits for those on a lane.
        let mut whole = kept.lock();
        if let Some(content) = content {
            whole.content.write((page - first) << PAGE_SHIFT, content).map_err(MissingPagesError::Staging)?;
        }
        whole.missing -= 1;
        if whole.missing > 0 {
            return Ok(());
        }
        self.half.lock().remove(&(block, first));
        let is_new = self.kernel.place_block(block, first, &whole.content)?;
        self.placed(block, first, unit, is_new)
    }

    /// What has come of a huge page.
    fn half(&self, block: usize, first: u64, unit: u64) -> Result<SharedHalf, MigrationError> {
        let mut half = self.half.lock();
        if let Some(kept) = half.get(&(block, first)) {
            return Ok(Arc::clone(kept));
        }
        let is_large = |block: usize| self.ram.block(block).page_bytes() > SMALL_HUGE_PAGE_BYTES;
        let (most, of) = match is_large(block) {
            true => (HALF_LARGE_PAGES + self.lanes, " of more than 2 MiB"),
            false => (HALF_HUGE_PAGES + HALF_HUGE_PAGES_OF_A_LANE * self.lanes, ""),
        };
        if half.keys().filter(|(other, _)| is_large(*other) == is_large(block)).count() >= most {
            let what = format!("more than {most} huge pages{of} came in parts at once");
            return Err(MigrationError::PeerMisbehaved { what });
        }
        let content = RamBlock::new("huge page", unit << PAGE_SHIFT, Backing::Anonymous);
        let content = content.map_err(MissingPagesError::Staging)?;
        let new = Arc::new(Mutex::new(Half { content, missing: unit }));
        half.insert((block, first), Arc::clone(&new));
        Ok(new)
    }

    fn placed(&self, block: usize, first: u64, count: u64, is_new: bool) -> Result<(), MigrationError> {
        if !is_new {
            let (offset, name) = (first << PAGE_SHIFT, self.ram.block(block).name());
            let what =
                format!("page {offset:#x} of block {name:?} was missing, and somebody else has filled it");
            return Err(MigrationError::Ram(what));
        }
        let cleared = self.lacking.block(block).clear_range(first, count);
        if self.left.fetch_sub(cleared, Ordering::AcqRel) == cleared {
            self.complete.get_or_init(Instant::now);
        }
        if let Some(blocktime) = &self.blocktime {
            blocktime.came(block, first, count);
        }
        Ok(())
    }
}
