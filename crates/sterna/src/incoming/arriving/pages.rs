//! The pages that arrive while the guest runs: the missing ones, and the placement of each exactly once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use sterna_ram::missing_pages::{Fault, MissingPages, MissingPagesError, Placed, PlacedEnd, TakenAhead};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SHIFT, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_wire::received_pages::ReceivedPages;

use super::blocktime::Blocktime;
use super::failures::Failures;
use super::ways::{Way, Ways};
use crate::error::{BadPage, MigrationError};
use crate::order::PageRun;

/// Most incomplete huge pages of at most [`SMALL_HUGE_PAGE_BYTES`]. A source sends a requested huge page whole,
/// and the others one after the other.
const HALF_HUGE_PAGES: usize = 16;
/// Additional incomplete huge pages for each lane.
const HALF_HUGE_PAGES_OF_A_LANE: usize = 2;
/// Larger huge pages need memory that a host may not have. Therefore only one is allowed on the main channel,
/// one on the preempt channel, and one on each lane.
const SMALL_HUGE_PAGE_BYTES: u64 = 2 << 20;
const HALF_LARGE_PAGES: usize = 2;

impl From<MissingPagesError> for MigrationError {
    fn from(error: MissingPagesError) -> Self {
        Self::Ram(Arc::new(error))
    }
}

/// A missing page that another part of this process has written.
#[derive(Debug, thiserror::Error)]
#[error("page {offset:#x} of block {block:?} was missing, and another part of this process has filled it")]
struct Occupied {
    block: String,
    offset: u64,
}

/// Which pages are missing, and where arriving pages are placed.
pub(crate) struct ArrivingPages {
    ram: GuestRam,
    kernel: MissingPages,
    /// Pages that are not in place. A bit is cleared only after its page is in place.
    lacking: DirtyBitmaps,
    /// Pages that arrived. The thread that sets a page's bit places the page, so that each is placed once.
    arrived: DirtyBitmaps,
    /// Set if lanes carry pages as well: a requested page then arrives a second time.
    ways: Option<Ways>,
    /// Pages that were requested from the source.
    requested: DirtyBitmaps,
    left: AtomicU64,
    began: Instant,
    /// When the last page was in place.
    complete: OnceLock<Instant>,
    /// Incomplete huge pages, by block and first page.
    half: Mutex<HashMap<(usize, u64), SharedHalf>>,
    lanes: usize,
    blocktime: Option<Blocktime>,
    failures: Mutex<Failures>,
}

/// A page of a block that arrived and could not be placed, with the reason.
struct Unplaced {
    page: u64,
    error: MigrationError,
}

/// Unmaps the missing pages, except those that `ahead` has unmapped already.
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
            // Whole pages of the backing memory. The source knows their size, and discards only whole ones.
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

/// Shared by the threads of the main channel, the preempt channel and the lanes.
type SharedHalf = Arc<Mutex<Half>>;

/// A huge page of which some 4 KiB pages have arrived.
struct Half {
    content: RamBlock,
    missing: u64,
}

impl ArrivingPages {
    /// Unmaps the missing pages. From now on a thread that touches one is blocked.
    ///
    /// `received`: pages that have arrived; `ahead`: pages that were unmapped before; `lanes`: number of lanes
    /// that carry pages as well.
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
        // Registers before the unmapping, so that an unmapped page stays unmapped.
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

    /// The measurement of waiting times, if it is on.
    pub(crate) fn blocktime(&self) -> Option<&Blocktime> {
        self.blocktime.as_ref()
    }

    /// Number of missing pages.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// The earliest time at which a thread can wait for a page.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// When the last page was in place.
    pub(crate) fn complete(&self) -> Option<Instant> {
        self.complete.get().copied()
    }

    /// Waits for threads that touch a missing page.
    pub(crate) fn wait(&self, faults: &mut Vec<Fault>) -> Result<bool, MigrationError> {
        Ok(self.kernel.wait(faults)?)
    }

    /// Records that a thread waits for a page. True: request the page.
    ///
    /// # Errors
    /// The page reads as zero and cannot be placed now. The thread waits until [`ArrivingPages::look_again`].
    pub(crate) fn wants(&self, fault: &Fault) -> Result<bool, MigrationError> {
        let Fault { block, first, count, .. } = *fault;
        if self.is_here(fault) {
            // The page arrived as zero, or was given back to the host since. Both read as zero.
            match self.kernel.place_zeros(block, first, count).end {
                None => {}
                Some(PlacedEnd::Occupied) => self.kernel.wake(block, first, count)?,
                Some(PlacedEnd::Failed(error)) => return Err(error.into()),
            }
            return Ok(false);
        }
        if let Some(blocktime) = &self.blocktime {
            blocktime.waits(fault);
            // The page may have arrived between the two checks.
            if self.is_here(fault) {
                blocktime.came(block, first, count);
            }
        }
        Ok(self.requested.block(block).set_range(first, count) > 0)
    }

    /// Lets a fault's thread access its page again. If the page is still missing, the thread blocks and the
    /// fault is reported again.
    pub(crate) fn look_again(&self, fault: &Fault) -> Result<(), MigrationError> {
        Ok(self.kernel.wake(fault.block, fault.first, fault.count)?)
    }

    fn is_here(&self, fault: &Fault) -> bool {
        let end = fault.first + fault.count;
        self.lacking.block(fault.block).next_run(fault.first, end, 1).is_none()
    }

    /// Places a page that arrived with content.
    pub(crate) fn page(&self, block: usize, page: u64, content: &[u8]) -> Result<(), MigrationError> {
        self.noting(block, || match self.comes(Way::Main, block, page)? {
            true => self.put(block, page, 1, Some(content)),
            false => Ok(()),
        })
    }

    /// Places a page that arrived as zero.
    pub(crate) fn zero(&self, block: usize, page: u64) -> Result<(), MigrationError> {
        self.noting(block, || match self.comes(Way::Main, block, page)? {
            true => self.put(block, page, 1, None),
            false => Ok(()),
        })
    }

    /// Places pages that arrived on a lane. `None`: they are zero.
    pub(crate) fn on_lane(&self, run: PageRun, content: Option<&[u8]>) -> Result<(), MigrationError> {
        self.noting(run.block, || self.run_on_lane(run, content))
    }

    fn run_on_lane(&self, run: PageRun, content: Option<&[u8]>) -> Result<(), Unplaced> {
        let bytes = |page: u64| ((page - run.first) as usize) << PAGE_SHIFT;
        let mut first = run.first;
        while first < run.end() {
            // Collects adjacent pages that did not arrive by the other path. If a later page is wrong, the
            // pages before it are still placed.
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

    /// Prepares for a new connection after a loss. No page may arrive during the call.
    ///
    /// Incomplete huge pages are dropped and sent again. Lanes carry no pages any more.
    pub(crate) fn begin_recovery(&self) {
        self.half.lock().clear();
        if let Some(ways) = &self.ways {
            ways.end();
        }
        for (arrived, lacking) in self.arrived.blocks().iter().zip(self.lacking.blocks()) {
            remove(arrived, lacking);
        }
    }

    /// Whether the same page could not be placed for the second time.
    pub(crate) fn fails_again(&self) -> bool {
        self.failures.lock().is_again()
    }

    /// Forgets the failures, because an operator lets the source reconnect.
    pub(crate) fn forget_failures(&self) {
        self.failures.lock().forget();
    }

    /// Records the page that could not be placed, if there is one.
    fn noting(
        &self,
        block: usize,
        place: impl FnOnce() -> Result<(), Unplaced>,
    ) -> Result<(), MigrationError> {
        place().map_err(|Unplaced { page, error }| {
            let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
            self.failures.lock().note((block, page / unit * unit));
            error
        })
    }

    /// The pages of a block that are in place.
    pub(crate) fn received(&self, block: usize) -> ReceivedPages {
        let lacking = self.lacking.block(block);
        let mut received = ReceivedPages::none(lacking.pages());
        (0..lacking.pages()).filter(|page| !lacking.get(*page)).for_each(|page| received.add(page));
        received
    }

    /// Pages that are requested and missing: block, first page and count, each a whole page of the backing
    /// memory.
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

    /// Wakes all waiting threads: all pages are in place, or no guest runs.
    pub(crate) fn end(&self) {
        self.kernel.end();
        self.kernel.stop_waiting();
    }

    /// Checks an arriving page. True: place it now.
    ///
    /// A page may arrive only if it is missing, and only once. With lanes, a requested page may arrive a second
    /// time.
    fn comes(&self, way: Way, block: usize, page: u64) -> Result<bool, Unplaced> {
        let ways = self.ways.as_ref().filter(|ways| !ways.are_over());
        let is_first_on_way = ways.is_none_or(|ways| ways.is_first(way, block, page));
        let was_missing = self.lacking.block(block).get(page) || self.arrived.block(block).get(page);
        if was_missing && is_first_on_way {
            if self.arrived.block(block).set_range(page, 1) > 0 {
                return Ok(true);
            }
            if ways.is_some() && self.requested.block(block).get(page) {
                return Ok(false);
            }
        }
        let (offset, block) = (page << PAGE_SHIFT, self.ram.block(block).name().to_owned());
        let why = match was_missing {
            true => BadPage::Twice { block, offset },
            false => BadPage::NotMissing { block, offset },
        };
        Err(Unplaced { page, error: why.into() })
    }

    /// Places pages that arrived together. `None`: zeros.
    fn put(&self, block: usize, first: u64, count: u64, content: Option<&[u8]>) -> Result<(), Unplaced> {
        let unit = self.ram.block(block).page_bytes() >> PAGE_SHIFT;
        if unit > 1 {
            return (0..count).try_for_each(|index| {
                let at = (index as usize) << PAGE_SHIFT;
                self.part(block, first + index, unit, content.map(|content| &content[at..at + PAGE_SIZE]))
            });
        }
        let placed = match content {
            Some(content) => self.kernel.place(block, first, content),
            None => self.kernel.place_zeros(block, first, count),
        };
        self.record(block, first, placed)
    }

    /// Keeps a part of a huge page, and places the huge page when its last part has arrived. `None`: zeros.
    fn part(&self, block: usize, page: u64, unit: u64, content: Option<&[u8]>) -> Result<(), Unplaced> {
        let first = page / unit * unit;
        let unplaced = |error| Unplaced { page, error };
        let kept = self.half(block, first, unit).map_err(unplaced)?;
        // Copied under the huge page's own lock, so that a requested page does not wait for a lane's pages.
        let mut whole = kept.lock();
        if let Some(content) = content {
            let written = whole.content.write((page - first) << PAGE_SHIFT, content);
            written.map_err(|error| unplaced(MissingPagesError::Staging(error).into()))?;
        }
        whole.missing -= 1;
        if whole.missing > 0 {
            return Ok(());
        }
        self.half.lock().remove(&(block, first));
        self.record(block, first, self.kernel.place_block(block, first, &whole.content))
    }

    /// The buffer of an incomplete huge page.
    fn half(&self, block: usize, first: u64, unit: u64) -> Result<SharedHalf, MigrationError> {
        let mut half = self.half.lock();
        if let Some(kept) = half.get(&(block, first)) {
            return Ok(Arc::clone(kept));
        }
        let is_large = |block: usize| self.ram.block(block).page_bytes() > SMALL_HUGE_PAGE_BYTES;
        let are_large = is_large(block);
        let most = match are_large {
            true => HALF_LARGE_PAGES + self.lanes,
            false => HALF_HUGE_PAGES + HALF_HUGE_PAGES_OF_A_LANE * self.lanes,
        };
        if half.keys().filter(|(other, _)| is_large(*other) == are_large).count() >= most {
            return Err(BadPage::TooManyParts { most, are_large }.into());
        }
        let content = RamBlock::new("huge page", unit << PAGE_SHIFT, Backing::Anonymous);
        let content = content.map_err(MissingPagesError::Staging)?;
        let new = Arc::new(Mutex::new(Half { content, missing: unit }));
        half.insert((block, first), Arc::clone(&new));
        Ok(new)
    }

    /// Records the pages that are in place, also if the page after them could not be placed.
    fn record(&self, block: usize, first: u64, placed: Placed) -> Result<(), Unplaced> {
        let Placed { pages, end } = placed;
        if pages > 0 {
            let cleared = self.lacking.block(block).clear_range(first, pages);
            if self.left.fetch_sub(cleared, Ordering::AcqRel) == cleared {
                self.complete.get_or_init(Instant::now);
            }
            if let Some(blocktime) = &self.blocktime {
                blocktime.came(block, first, pages);
            }
        }
        let page = first + pages;
        let error = match end {
            None => return Ok(()),
            Some(PlacedEnd::Occupied) => {
                let block = self.ram.block(block).name().to_owned();
                MigrationError::Ram(Arc::new(Occupied { block, offset: page << PAGE_SHIFT }))
            }
            Some(PlacedEnd::Failed(error)) => error.into(),
        };
        Err(Unplaced { page, error })
    }
}
