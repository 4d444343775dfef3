//! Pages of checkpoints, copied before the guest stands or while it does, so that it goes on while they travel.
//!
//! Those of one checkpoint lie side by side in an arena in the order of their blocks and pages, so the pages of a run of dirty pages are
//! neighbours there, too. What is copied [ahead](Staging::stage_ahead) lies in one place. What is found later is copied over it, or lies in
//! another. Several checkpoints may wait; lanes read the one that is sent. The arena takes memory as it is used, up to its limit.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamError, RamSlice};

use super::on_write::Deferred;
use super::pieces::{Piece, bytes, count, laid, merged, place_of, runs_of, split};
use super::ways::{CheckpointCopy, CopyCounts, Ways};

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::outgoing::guest_source::PageReader;

/// Where lanes read: guest RAM, or what was copied of it.
pub(crate) struct Staging {
    ram: GuestRam,
    arena: RamBlock,
    limit_pages: u64,
    state: RwLock<State>,
    ways: Ways,
}

#[derive(Default)]
struct State {
    /// Copied for the next checkpoint while the guest runs.
    ahead: Option<Ahead>,
    /// Copied, and not sent yet; the oldest first.
    waiting: VecDeque<Arc<Staged>>,
    /// What lanes read; `None`: guest RAM.
    sent: Option<Arc<Staged>>,
}

/// Pages as they were, or newer.
struct Ahead {
    place: Range<u64>,
    pieces: Vec<Piece>,
}

/// The pages of one checkpoint.
struct Staged {
    /// Their places in the arena.
    places: Vec<Range<u64>>,
    /// Ordered by block and page.
    pieces: Arc<[Piece]>,
    /// What may still have to be copied.
    deferred: Option<Arc<Deferred>>,
}

impl Staging {
    /// Nothing is staged. At most `limit_bytes` (at least a page) will be.
    pub(crate) fn new(ram: &GuestRam, limit_bytes: u64) -> Result<Self, RamError> {
        let limit_pages = (limit_bytes / PAGE_SIZE as u64).max(1);
        let arena = RamBlock::new("staged checkpoint", bytes(limit_pages), Backing::Anonymous)?;
        let ways = Ways::new(ram, &arena);
        Ok(Self { ram: ram.clone(), arena, limit_pages, state: RwLock::default(), ways })
    }

    /// At most so many bytes are staged.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_pages * PAGE_SIZE as u64
    }

    /// Copies pages of the next checkpoint while the guest runs. All of them were re-armed before: what is written from then on must be
    /// among the pages of [`Staging::stage`]. What was copied ahead earlier is forgotten. Gives false where there is no room.
    ///
    /// # Errors
    /// Memory has failed.
    pub(crate) fn stage_ahead(&self, pages: &DirtyBitmaps) -> Result<bool, MigrationError> {
        self.drop_ahead();
        // No place is given anew to which something may still be copied.
        self.ways.settle();
        let count = pages.count();
        let Some(start) = self.state.read().gap(count, self.limit_pages) else { return Ok(false) };
        let pieces = laid(&runs_of(pages), start);
        self.ways.copy_ahead(&pieces)?;
        self.state.write().ahead = Some(Ahead { place: start..start + count, pieces });
        Ok(true)
    }

    /// Forgets what was copied ahead. Gives how many pages that were.
    pub(crate) fn drop_ahead(&self) -> u64 {
        self.state.write().ahead.take().map_or(0, |ahead| count(&ahead.pieces))
    }

    /// Whether there is room for these pages beside what was copied ahead.
    pub(crate) fn has_room(&self, pages: &DirtyBitmaps) -> bool {
        let state = self.state.read();
        let needed = match &state.ahead {
            Some(ahead) => pages.count() - count(&split(&ahead.pieces, &runs_of(pages)).0),
            None => pages.count(),
        };
        state.gap(needed, self.limit_pages).is_some()
    }

    /// Stages a checkpoint: these pages as they are now, and with them what was [copied ahead](Staging::stage_ahead). It waits until it is
    /// sent. The guest stands. The pages are copied when this returns, or while the guest [goes on](Staging::go_on).
    ///
    /// # Errors
    /// [`MigrationError::Internal`] where there is no room.
    pub(crate) fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        self.ways.settle();
        let runs = runs_of(pages);
        // What was copied ahead keeps its place, also where something fails here.
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

    /// Gets ready for the next checkpoint while the guest runs: earlier pages are copied to the last one. `holds_writes`: the VM says
    /// that its guest's writes can be held. Gives what an operator should know, once.
    pub(crate) fn prepare(&self, holds_writes: bool) -> Option<String> {
        self.ways.prepare(holds_writes)
    }

    /// The guest goes on: what was staged is copied now, if it was not yet.
    pub(crate) fn go_on(&self) {
        self.ways.go_on();
    }

    /// No checkpoint follows: what was staged is copied to the last page, and no write of the guest is held any more.
    pub(crate) fn end(&self) {
        self.drop_ahead();
        self.ways.end();
    }

    /// Changes how pages are brought here, from the next checkpoint on.
    pub(crate) fn set_way(&self, way: CheckpointCopy) {
        self.ways.set(way);
    }

    /// How they were.
    pub(crate) fn copy_counts(&self) -> CopyCounts {
        self.ways.counts()
    }

    /// Lanes read the oldest checkpoint that waits.
    ///
    /// # Errors
    /// [`MigrationError::Internal`] if none does.
    pub(crate) fn send_next(&self) -> Result<(), MigrationError> {
        let mut state = self.state.write();
        state.sent = state.waiting.pop_front();
        let missing = || MigrationError::Internal("a checkpoint is sent that was not copied".to_owned());
        state.sent.is_some().then_some(()).ok_or_else(missing)
    }

    /// Lanes read guest RAM again. What waits stays.
    pub(crate) fn clear(&self) {
        self.state.write().sent = None;
    }

    fn place(&self, page: u64, length: usize) -> Result<RamSlice<'_>, RamError> {
        self.arena.slice(bytes(page), length)
    }
}

impl State {
    /// The first place of so many pages, the lowest that is free.
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

impl PageReader for Staging {
    fn together(&self, run: PageRun) -> u64 {
        let Some(staged) = self.state.read().sent.clone() else { return run.count };
        // A page that is nowhere is reported when it is read.
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
