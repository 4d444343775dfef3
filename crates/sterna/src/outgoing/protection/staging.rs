//! Pages of checkpoints, copied while the guest stands, so that it goes on while they travel.
//!
//! Those of one checkpoint lie side by side in an arena in the order of their blocks and pages, so the pages of any run of dirty pages are
//! neighbours there, too. Several checkpoints may wait; lanes read the one that is sent. The arena takes memory as it is used, up to its
//! limit.

use std::collections::VecDeque;

use parking_lot::RwLock;
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamError, RamSlice};

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::outgoing::guest_source::PageReader;

/// From so many pages on a second thread is worth its start.
const PAGES_PER_THREAD: u64 = 1024;
/// More threads do not copy faster: memory is the limit.
const MOST_THREADS: u64 = 4;

/// Where lanes read: guest RAM, or what was copied of it.
pub(crate) struct Staging {
    ram: GuestRam,
    arena: RamBlock,
    limit_pages: u64,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// Copied, and not sent yet; the oldest first.
    waiting: VecDeque<Staged>,
    /// What lanes read; `None`: guest RAM.
    sent: Option<Staged>,
}

/// The pages of one checkpoint.
struct Staged {
    /// Their place in the arena.
    place: std::ops::Range<u64>,
    /// Ordered by block and page.
    pieces: Vec<Piece>,
}

/// A run of pages and its place in the arena.
#[derive(Debug, Clone, Copy)]
struct Piece {
    run: PageRun,
    at: u64,
}

impl Staging {
    /// Nothing is staged. At most `limit_bytes` (at least a page) will be.
    pub(crate) fn new(ram: &GuestRam, limit_bytes: u64) -> Result<Self, RamError> {
        let limit_pages = (limit_bytes / PAGE_SIZE as u64).max(1);
        Ok(Self {
            ram: ram.clone(),
            arena: RamBlock::new("staged checkpoint", limit_pages * PAGE_SIZE as u64, Backing::Anonymous)?,
            limit_pages,
            state: RwLock::default(),
        })
    }

    /// At most so many bytes are staged.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_pages * PAGE_SIZE as u64
    }

    /// Whether so many pages may be staged now.
    pub(crate) fn has_room(&self, pages: u64) -> bool {
        self.state.read().gap(pages, self.limit_pages).is_some()
    }

    /// Copies these pages: they wait until they are sent. The guest stands.
    ///
    /// # Errors
    /// [`MigrationError::Internal`] where there is no room.
    pub(crate) fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        let count = pages.count();
        let full = || MigrationError::Internal(format!("no room for the {count} pages of a checkpoint"));
        let start = self.state.read().gap(count, self.limit_pages).ok_or_else(full)?;
        let mut pieces = Vec::new();
        let mut at = start;
        for (block, bits) in pages.blocks().iter().enumerate() {
            let mut from = 0;
            while let Some(found) = bits.next_run(from, bits.pages(), u64::MAX) {
                let run = PageRun { block, first: found.first, count: found.count };
                pieces.push(Piece { run, at });
                at += run.count;
                from = run.end();
            }
        }
        self.copy_all(&pieces, start..at)?;
        self.state.write().waiting.push_back(Staged { place: start..at, pieces });
        Ok(())
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

    fn copy_all(&self, pieces: &[Piece], place: std::ops::Range<u64>) -> Result<(), MigrationError> {
        let pages = place.end - place.start;
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let threads = (pages / PAGES_PER_THREAD).clamp(1, MOST_THREADS.min(processors));
        let share = pages.div_ceil(threads).max(1);
        let part = |thread: u64| {
            let first = place.start + thread * share;
            self.copy_part(pieces, first..first + share)
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || part(thread))).collect();
            let mut done = part(0);
            for other in others {
                let other = other.join().unwrap_or_else(|_| {
                    Err(MigrationError::Internal("a thread that copies a checkpoint panicked".to_owned()))
                });
                done = done.and(other);
            }
            done
        })
    }

    /// Copies what belongs to these pages of the arena.
    fn copy_part(&self, pieces: &[Piece], places: std::ops::Range<u64>) -> Result<(), MigrationError> {
        let first = pieces.partition_point(|piece| piece.at + piece.run.count <= places.start);
        for piece in pieces[first..].iter().take_while(|piece| piece.at < places.end) {
            let skip = places.start.saturating_sub(piece.at);
            let count = piece.run.count.min(places.end - piece.at) - skip;
            let length = count as usize * PAGE_SIZE;
            let from =
                self.ram.block(piece.run.block).slice((piece.run.first + skip) * PAGE_SIZE as u64, length)?;
            from.copy_to_window(&self.place(piece.at + skip, length)?)?;
        }
        Ok(())
    }

    fn place(&self, page: u64, length: usize) -> Result<RamSlice<'_>, RamError> {
        self.arena.slice(page * PAGE_SIZE as u64, length)
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
        let (offset, length) = (run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE);
        let state = self.state.read();
        let Some(Staged { pieces, .. }) = &state.sent else {
            return Ok(self.ram.block(run.block).slice(offset, length)?);
        };
        let after =
            pieces.partition_point(|piece| (piece.run.block, piece.run.first) <= (run.block, run.first));
        let found = after.checked_sub(1).map(|index| pieces[index]);
        match found.filter(|piece| piece.run.block == run.block && run.end() <= piece.run.end()) {
            Some(piece) => Ok(self.place(piece.at + run.first - piece.run.first, length)?),
            None => Err(MigrationError::Internal(format!("{run:?} is not in the checkpoint that is sent"))),
        }
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
