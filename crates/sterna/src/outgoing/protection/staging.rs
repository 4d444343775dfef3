//! Pages of a checkpoint, copied while the guest stands, so that it goes on while they travel.
//!
//! They lie in an arena in the order of their blocks and pages, so the pages of any run of dirty pages are neighbours there, too.
//! The arena takes memory as it is used, up to its limit.

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
    /// What is staged, ordered by block and page; `None`: lanes read guest RAM.
    staged: RwLock<Option<Vec<Piece>>>,
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
            staged: RwLock::new(None),
        })
    }

    /// At most so many bytes are staged.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_pages * PAGE_SIZE as u64
    }

    /// Whether so many pages may be staged.
    pub(crate) fn has_room(&self, pages: u64) -> bool {
        pages <= self.limit_pages
    }

    /// Copies these pages. The guest stands, no lane reads, and there is room.
    pub(crate) fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        let mut pieces = Vec::new();
        let mut at = 0;
        for (block, bits) in pages.blocks().iter().enumerate() {
            let mut from = 0;
            while let Some(found) = bits.next_run(from, bits.pages(), u64::MAX) {
                let run = PageRun { block, first: found.first, count: found.count };
                pieces.push(Piece { run, at });
                at += run.count;
                from = run.end();
            }
        }
        self.copy_all(&pieces, at)?;
        *self.staged.write() = Some(pieces);
        Ok(())
    }

    /// Lanes read guest RAM again.
    pub(crate) fn clear(&self) {
        *self.staged.write() = None;
    }

    fn copy_all(&self, pieces: &[Piece], pages: u64) -> Result<(), MigrationError> {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let threads = (pages / PAGES_PER_THREAD).clamp(1, MOST_THREADS.min(processors));
        let share = pages.div_ceil(threads).max(1);
        let part = |thread: u64| self.copy_part(pieces, thread * share..(thread + 1) * share);
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

impl PageReader for Staging {
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let (offset, length) = (run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE);
        let staged = self.staged.read();
        let Some(pieces) = &*staged else {
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
}
