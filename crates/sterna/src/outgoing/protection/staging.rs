//! Pages of checkpoints, copied while the guest stands, so that it goes on while they travel.
//!
//! Those of one checkpoint lie side by side in an arena in the order of their blocks and pages, so the pages of any run of dirty pages are
//! neighbours there, too. Several checkpoints may wait; lanes read the one that is sent. The arena takes memory as it is used, up to its
//! limit.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::RwLock;
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamError, RamSlice};

use super::on_write::Deferred;
use super::pieces::{Piece, bytes, pieces_of, place_of};
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
    /// Copied, and not sent yet; the oldest first.
    waiting: VecDeque<Arc<Staged>>,
    /// What lanes read; `None`: guest RAM.
    sent: Option<Arc<Staged>>,
}

/// The pages of one checkpoint.
struct Staged {
    /// Their place in the arena.
    place: std::ops::Range<u64>,
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

    /// Whether so many pages may be staged now.
    pub(crate) fn has_room(&self, pages: u64) -> bool {
        self.state.read().gap(pages, self.limit_pages).is_some()
    }

    /// Stages these pages, as they are now: they wait until they are sent. The guest stands. They are copied when this returns, or while
    /// the guest [goes on](Staging::go_on).
    ///
    /// # Errors
    /// [`MigrationError::Internal`] where there is no room.
    pub(crate) fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        // No place is given anew to which something may still be copied.
        self.ways.settle();
        let count = pages.count();
        let full = || MigrationError::Internal(format!("no room for the {count} pages of a checkpoint"));
        let start = self.state.read().gap(count, self.limit_pages).ok_or_else(full)?;
        let pieces: Arc<[Piece]> = pieces_of(pages, start).into();
        let deferred = self.ways.bring(&pieces)?;
        let staged = Staged { place: start..start + count, pieces, deferred };
        self.state.write().waiting.push_back(Arc::new(staged));
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
        let mut taken: Vec<_> =
            self.waiting.iter().chain(&self.sent).map(|staged| staged.place.clone()).collect();
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
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let length = run.count as usize * PAGE_SIZE;
        let Some(staged) = self.state.read().sent.clone() else {
            return Ok(self.ram.block(run.block).slice(bytes(run.first), length)?);
        };
        let missing = || MigrationError::Internal(format!("{run:?} is not in the checkpoint that is sent"));
        let place = place_of(&staged.pieces, run).ok_or_else(missing)?;
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
mod tests {
    use super::*;

    const PAGES: u64 = 6000;

    #[test]
    fn staged_pages_are_those_of_the_moment_in_which_they_were_copied() {
        let length = PAGES * PAGE_SIZE as u64;
        let blocks = ["m0", "m1"].map(|name| RamBlock::new(name, length, Backing::Memfd).unwrap());
        let ram = GuestRam::new(blocks.to_vec()).unwrap();
        let content = |block: usize, page: u64| (page * 2 + block as u64 + 1) as u8;
        for block in 0..2 {
            for page in 0..PAGES {
                ram.block(block).write(page * PAGE_SIZE as u64, &[content(block, page)]).unwrap();
            }
        }
        let dirty = DirtyBitmaps::new(&ram);
        // More than one thread's share, and pieces that end where a share does not.
        dirty.block(0).set_range(3, 2500);
        for page in 0..100 {
            dirty.block(1).set(page * 7);
        }
        dirty.block(1).set_range(PAGES - 1000, 1000);
        let staging = Staging::new(&ram, length).unwrap();

        staging.stage(&dirty).unwrap();
        staging.send_next().unwrap();
        (0..2).for_each(|block| ram.block(block).write(0, &vec![0; length as usize]).unwrap());

        let read = |block: usize, first: u64, count: u64| {
            let slice = staging.content(PageRun { block, first, count }).unwrap();
            let mut bytes = vec![0; slice.len()];
            slice.copy_to(&mut bytes).unwrap();
            bytes.chunks(PAGE_SIZE).map(|page| page[0]).collect::<Vec<_>>()
        };
        for (block, first, count) in
            [(0, 3, 128), (0, 1200, 128), (0, 2500, 3), (1, 14, 1), (1, PAGES - 1, 1)]
        {
            let wanted: Vec<_> = (first..first + count).map(|page| content(block, page)).collect();
            assert_eq!(read(block, first, count), wanted);
        }
        assert!(staging.content(PageRun { block: 0, first: 2, count: 2 }).is_err());
        assert!(staging.content(PageRun { block: 1, first: 14, count: 2 }).is_err());
        staging.clear();
        assert_eq!(read(0, 3, 1), [0]);
    }

    #[test]
    fn checkpoints_that_wait_share_the_room_and_are_read_in_order() {
        let block = RamBlock::new("m0", 64 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        let ram = GuestRam::new(vec![block]).unwrap();
        let staging = Staging::new(&ram, 32 * PAGE_SIZE as u64).unwrap();
        let dirty = |first: u64, count: u64| {
            let pages = DirtyBitmaps::new(&ram);
            pages.block(0).set_range(first, count);
            pages
        };
        let write = |byte: u8| ram.block(0).write(0, &vec![byte; 64 * PAGE_SIZE]).unwrap();
        let read = |first: u64| {
            let mut byte = [0; PAGE_SIZE];
            staging.content(PageRun { block: 0, first, count: 1 }).unwrap().copy_to(&mut byte).unwrap();
            byte[0]
        };
        for (byte, first, count) in [(1, 0, 10), (2, 5, 12), (3, 60, 4)] {
            write(byte);
            assert!(staging.has_room(count));
            staging.stage(&dirty(first, count)).unwrap();
        }
        write(9);

        // 26 of 32 pages are taken.
        assert!(staging.has_room(6) && !staging.has_room(7));
        assert!(staging.stage(&dirty(0, 7)).is_err());
        assert_eq!(read(5), 9, "nothing is sent yet");
        staging.send_next().unwrap();
        assert_eq!((read(0), read(5)), (1, 1));
        staging.clear();
        // The first ten pages are free again, and the six at the end.
        assert!(staging.has_room(10) && !staging.has_room(11));
        staging.stage(&dirty(20, 10)).unwrap();
        staging.stage(&dirty(40, 6)).unwrap();
        assert!(!staging.has_room(1) && staging.has_room(0));
        for (page, byte) in [(5, 2), (16, 2), (63, 3), (20, 9), (45, 9)] {
            if [5, 63, 20, 45].contains(&page) {
                staging.send_next().unwrap();
            }
            assert_eq!(read(page), byte, "page {page}");
        }
        staging.clear();
        assert!(staging.send_next().is_err());
        assert!(staging.has_room(32));
    }
}
