//! Staging memory: copies of a checkpoint's pages, which lanes send while the guest runs.
//!
//! Pages are copied before the guest is paused, while it is paused, or after it resumed. The pages of one
//! checkpoint are adjacent in an arena, ordered by block and page. Therefore a run of dirty pages is also a run
//! in the arena. Pages that are copied [ahead](Staging::stage_ahead) have one range of the arena. Pages that
//! become dirty later are copied over them, or into another range. Several checkpoints may wait to be sent. Lanes
//! read the one that is being sent. The arena allocates memory on first use, up to its limit.

mod copy;
mod on_write;
mod pieces;
mod ways;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;
use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna::internals::{PageReader, Staging};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamError, RamSlice};

use on_write::Deferred;
use pieces::{Piece, bytes, count, laid, merged, place_of, runs_of, split};
use ways::Ways;

pub use ways::CheckpointCopy;
pub(super) use ways::CopyCounts;

/// The memory that lanes read: guest RAM, or staged copies of its pages.
pub(super) struct CopiedPages {
    ram: GuestRam,
    arena: RamBlock,
    limit_pages: u64,
    state: RwLock<State>,
    ways: Ways,
}

#[derive(Default)]
struct State {
    /// Pages that were copied for the next checkpoint while the guest runs.
    ahead: Option<Ahead>,
    /// Staged checkpoints that are not sent yet; the oldest first.
    waiting: VecDeque<Arc<Staged>>,
    /// The checkpoint that lanes read; `None`: lanes read guest RAM.
    sent: Option<Arc<Staged>>,
}

/// Pages that were copied ahead. The guest may have written them again.
struct Ahead {
    place: Range<u64>,
    pieces: Vec<Piece>,
}

/// The pages of one checkpoint.
struct Staged {
    /// Their places in the arena.
    places: Vec<Range<u64>>,
    /// Its pieces, ordered by block and page.
    pieces: Arc<[Piece]>,
    /// Pages that may not be copied yet, because copy-on-write protects them.
    deferred: Option<Arc<Deferred>>,
}

impl CopiedPages {
    /// An empty staging memory of at most `limit_bytes` (at least one page).
    pub(super) fn new(ram: &GuestRam, limit_bytes: u64) -> Result<Self, RamError> {
        let limit_pages = (limit_bytes / PAGE_SIZE as u64).max(1);
        let arena = RamBlock::new("staged checkpoint", bytes(limit_pages), Backing::Anonymous)?;
        let ways = Ways::new(ram, &arena);
        Ok(Self { ram: ram.clone(), arena, limit_pages, state: RwLock::default(), ways })
    }

    /// Changes how pages are copied, from the next checkpoint on.
    pub(super) fn set_way(&self, way: CheckpointCopy) {
        self.ways.set(way);
    }

    /// Counts of how pages were copied.
    pub(super) fn copy_counts(&self) -> CopyCounts {
        self.ways.counts()
    }

    fn place(&self, page: u64, length: usize) -> Result<RamSlice<'_>, RamError> {
        self.arena.slice(bytes(page), length)
    }
}

impl Staging for CopiedPages {
    fn limit_bytes(&self) -> u64 {
        self.limit_pages * PAGE_SIZE as u64
    }

    fn stage_ahead(&self, pages: &DirtyBitmaps) -> Result<bool, MigrationError> {
        self.drop_ahead();
        // A page of the last checkpoint may still have to be copied into a place that would be reused here.
        self.ways.settle();
        let count = pages.count();
        let Some(start) = self.state.read().gap(count, self.limit_pages) else { return Ok(false) };
        let pieces = laid(&runs_of(pages), start);
        self.ways.copy_ahead(&pieces)?;
        self.state.write().ahead = Some(Ahead { place: start..start + count, pieces });
        Ok(true)
    }

    fn drop_ahead(&self) -> u64 {
        self.state.write().ahead.take().map_or(0, |ahead| count(&ahead.pieces))
    }

    fn has_room(&self, pages: &DirtyBitmaps) -> bool {
        let state = self.state.read();
        let needed = match &state.ahead {
            Some(ahead) => pages.count() - count(&split(&ahead.pieces, &runs_of(pages)).0),
            None => pages.count(),
        };
        state.gap(needed, self.limit_pages).is_some()
    }

    fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        self.ways.settle();
        let runs = runs_of(pages);
        // The pages that were copied ahead keep their place, even if a later step fails.
        let (ahead, start, again, others) = {
            let state = self.state.read();
            let ahead = state.ahead.as_ref().map_or(&[][..], |ahead| &ahead.pieces).to_vec();
            let (again, others) = split(&ahead, &runs);
            let needed = others.iter().map(|run| run.count).sum();
            let full = || MigrationError::Internal(format!("no room for {needed} pages of a checkpoint"));
            let start = state.gap(needed, self.limit_pages).ok_or_else(full)?;
            (ahead, start, again, laid(&others, start))
        };
        let now: Arc<[Piece]> = merged(&again, &others).into();
        let deferred = self.ways.bring(&now)?;
        self.ways.stayed(count(&ahead) - count(&again));
        let pieces = if ahead.is_empty() { now } else { merged(&ahead, &others).into() };
        let mut state = self.state.write();
        let place = state.ahead.take().map(|ahead| ahead.place);
        let places = place.into_iter().chain(std::iter::once(start..start + count(&others))).collect();
        state.waiting.push_back(Arc::new(Staged { places, pieces, deferred }));
        Ok(())
    }

    fn prepare(&self, holds_writes: bool) -> Option<String> {
        self.ways.prepare(holds_writes)
    }

    fn go_on(&self) {
        self.ways.go_on();
    }

    fn end(&self) {
        self.drop_ahead();
        self.ways.end();
    }

    fn send_next(&self) -> Result<(), MigrationError> {
        let mut state = self.state.write();
        state.sent = state.waiting.pop_front();
        let missing = || MigrationError::Internal("a checkpoint is sent that was not copied".to_owned());
        state.sent.is_some().then_some(()).ok_or_else(missing)
    }

    fn clear(&self) {
        self.state.write().sent = None;
    }
}

impl State {
    /// The lowest free range of `pages` pages: its first page.
    fn gap(&self, pages: u64, limit: u64) -> Option<u64> {
        let staged = self.waiting.iter().chain(&self.sent).flat_map(|staged| &staged.places);
        let mut taken: Vec<_> = staged.chain(self.ahead.as_ref().map(|ahead| &ahead.place)).collect();
        taken.sort_unstable_by_key(|place| place.start);
        let mut start = 0;
        for place in taken {
            if place.start.saturating_sub(start) >= pages && place.start > start {
                break;
            }
            start = start.max(place.end);
        }
        (pages <= limit.saturating_sub(start)).then_some(start)
    }
}

impl PageReader for CopiedPages {
    fn together(&self, run: PageRun) -> u64 {
        let Some(staged) = self.state.read().sent.clone() else { return run.count };
        // A page without a place is reported when it is read.
        place_of(&staged.pieces, run).map_or(run.count, |(_, count)| count)
    }

    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let length = run.count as usize * PAGE_SIZE;
        let Some(staged) = self.state.read().sent.clone() else {
            return Ok(self.ram.block(run.block).slice(bytes(run.first), length)?);
        };
        let missing = || MigrationError::Internal(format!("{run:?} is not in the checkpoint that is sent"));
        let place = place_of(&staged.pieces, run).filter(|(_, count)| *count == run.count);
        let (place, _) = place.ok_or_else(missing)?;
        if let Some(deferred) = &staged.deferred {
            deferred.ensure(run)?;
        }
        Ok(self.place(place, length)?)
    }

    fn is_copy(&self) -> bool {
        self.state.read().sent.is_some()
    }
}

#[cfg(test)]
mod tests;
