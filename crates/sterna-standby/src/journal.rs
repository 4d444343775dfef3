//! The journal: it keeps the pages of the arriving checkpoint, up to a limit, until the checkpoint is held.
//!
//! Lanes read payloads into an arena. When the checkpoint is held, its pages are copied from the arena to RAM. Each
//! lane notes its pages, with their round (between two flushes, `specs/stream.md §3.5`). A page arrives at most once
//! per round over all lanes. Therefore the notes of one round may be applied in any order, but rounds only one after
//! the other.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna::error::{BadPage, MigrationError};
use sterna::internals::PageRun;
use sterna::internals::threads::{copied_in_parts, in_part};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamError, RamSlice};
use sterna_wire::replica::PageSums;

/// Bytes that one step copies from the arena to RAM. The buffer for one step stays in the processor's cache.
const COPIED: usize = 128 << 10;

/// The journal of one checkpoint.
pub(super) struct Journal {
    limit_bytes: u64,
    /// Contents of the pages. Its memory is populated as pages arrive.
    arena: RamBlock,
    /// First free page of the arena.
    next: AtomicU64,
    /// Number of notes of zero pages, which have no page in the arena. They count towards the limit, too.
    notes: AtomicU64,
    /// Pages that have arrived, so that a missing page needs no search in the notes.
    came: DirtyBitmaps,
    /// Whether to sum the pages, because each checkpoint ends with a summary.
    sums_up: AtomicBool,
    /// Notes of each lane. The main channel's lane is the last.
    lanes: Vec<Mutex<LaneNotes>>,
}

#[derive(Default)]
struct LaneNotes {
    round: u32,
    notes: Vec<Note>,
    /// Runs that were prepared and not committed, with their place in the arena.
    open: Vec<(PageRun, u64)>,
    /// Sums of the pages that arrived.
    sums: PageSums,
}

/// A run of pages that arrived, and its place.
#[derive(Debug, Clone, Copy)]
struct Note {
    round: u32,
    run: PageRun,
    /// First page in the arena; `None` for zero pages.
    at: Option<u64>,
}

/// Counts of a checkpoint's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Brought {
    pub(super) normal_pages: u64,
    pub(super) zero_pages: u64,
    /// Bytes of the journal's limit that the checkpoint used.
    pub(super) bytes: u64,
}

impl Journal {
    /// Creates a journal for pages of `ram`, of at most `limit_bytes` (at least one page). `lanes` is the number of
    /// lanes, including the main channel.
    pub(super) fn new(ram: &GuestRam, limit_bytes: u64, lanes: usize) -> Result<Self, RamError> {
        let limit_bytes = limit_bytes.max(PAGE_SIZE as u64) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        Ok(Self {
            arena: RamBlock::new("checkpoint journal", limit_bytes, Backing::Anonymous)?,
            limit_bytes,
            came: DirtyBitmaps::new(ram),
            sums_up: AtomicBool::new(false),
            next: AtomicU64::new(0),
            notes: AtomicU64::new(0),
            lanes: (0..lanes).map(|_| Mutex::default()).collect(),
        })
    }

    /// Sums the pages that arrive from now on.
    pub(super) fn sum_up(&self) {
        self.sums_up.store(true, Ordering::Release);
    }

    /// Returns the place in the arena into which lane `lane` reads the content of `run`.
    ///
    /// # Errors
    /// The checkpoint is larger than the limit.
    pub(super) fn prepare(&self, lane: usize, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let at = self
            .next
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |next| {
                let end = next.checked_add(run.count)?;
                (self.bytes_of(end, self.notes.load(Ordering::Acquire)) <= self.limit_bytes).then_some(end)
            })
            .map_err(|_| self.full())?;
        self.lanes[lane].lock().open.push((run, at));
        Ok(self.arena.slice(at * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?)
    }

    /// Notes `run`, whose content is now in the place that [`prepare`](Self::prepare) returned.
    pub(super) fn commit(&self, lane: usize, run: PageRun) -> Result<(), MigrationError> {
        let mut notes = self.lanes[lane].lock();
        let Some(index) = notes.open.iter().position(|(open, _)| *open == run) else {
            return Err(MigrationError::Internal(format!("commit of {run:?}, which was not prepared")));
        };
        let (_, at) = notes.open.remove(index);
        self.came.block(run.block).set_range(run.first, run.count);
        notes.note(run, Some(at));
        if self.sums_up.load(Ordering::Acquire) {
            let mut content = [0; PAGE_SIZE];
            for page in 0..run.count {
                self.arena.read((at + page) * PAGE_SIZE as u64, &mut content)?;
                notes.sums.page(run.block, run.first + page, &content);
            }
        }
        Ok(())
    }

    /// Notes that the pages of `run` are zero.
    ///
    /// # Errors
    /// The checkpoint is larger than the limit.
    pub(super) fn zero(&self, lane: usize, run: PageRun) -> Result<(), MigrationError> {
        self.came.block(run.block).set_range(run.first, run.count);
        let mut lane = self.lanes[lane].lock();
        if self.sums_up.load(Ordering::Acquire) {
            lane.sums.zeros(run.block, run.first, run.count);
        }
        if lane.note(run, None) {
            let notes = self.notes.fetch_add(1, Ordering::AcqRel) + 1;
            if self.bytes_of(self.next.load(Ordering::Acquire), notes) > self.limit_bytes {
                return Err(self.full());
            }
        }
        Ok(())
    }

    /// Starts the lane's next round.
    pub(super) fn settle(&self, lane: usize) {
        self.lanes[lane].lock().round += 1;
    }

    /// Copies the last content of `page` that lane `lane` received to `to`. Returns false, and leaves `to` unchanged,
    /// if the page has not arrived.
    ///
    /// # Errors
    /// Another lane received the page: the order of the two contents is unknown.
    pub(super) fn current(
        &self,
        lane: usize,
        block: usize,
        page: u64,
        to: &mut [u8],
    ) -> Result<bool, MigrationError> {
        if !self.came.block(block).get(page) {
            return Ok(false);
        }
        let notes = self.lanes[lane].lock();
        let holds =
            |note: &&Note| note.run.block == block && (note.run.first..note.run.end()).contains(&page);
        let Some(note) = notes.notes.iter().rev().find(holds) else {
            return Err(BadPage::DifferenceToOtherChannel { block, page }.into());
        };
        match note.at {
            Some(at) => self.arena.read((at + page - note.run.first) * PAGE_SIZE as u64, to)?,
            None => to.fill(0),
        }
        Ok(true)
    }

    /// Counts the pages that have arrived so far.
    pub(super) fn brought(&self) -> Brought {
        let mut brought = Brought { bytes: self.bytes(), ..Brought::default() };
        for lane in &self.lanes {
            for note in &lane.lock().notes {
                let pages =
                    if note.at.is_some() { &mut brought.normal_pages } else { &mut brought.zero_pages };
                *pages += note.run.count;
            }
        }
        brought
    }

    /// Sums of the pages that have arrived so far, if pages are summed.
    pub(super) fn sums(&self) -> PageSums {
        let mut sums = PageSums::default();
        self.lanes.iter().for_each(|lane| sums.add(&lane.lock().sums));
        sums
    }

    /// Copies all pages of the checkpoint to `ram`. Idempotent.
    ///
    /// # Errors
    /// Memory of this host has failed.
    pub(super) fn apply(&self, ram: &GuestRam) -> Result<(), MigrationError> {
        let lanes: Vec<_> = self.lanes.iter().map(Mutex::lock).collect();
        let last =
            lanes.iter().filter_map(|lane| lane.notes.last()).map(|note| note.round).max().unwrap_or(0);
        for round in 0..=last {
            let notes: Vec<_> = lanes.iter().flat_map(|lane| lane.of_round(round)).copied().collect();
            let pages = notes.iter().map(|note| note.run.count).sum();
            copied_in_parts(pages, |part| self.put_part(&notes, part, ram))?;
        }
        Ok(())
    }

    /// Copies a part of the notes' pages to `ram`. `pages` counts from the first page of the first note.
    fn put_part(&self, notes: &[Note], pages: Range<u64>, ram: &GuestRam) -> Result<(), MigrationError> {
        let mut buffer = vec![0; COPIED];
        for (note, skip, count) in in_part(notes, pages, |note| note.run.count) {
            let run = PageRun { first: note.run.first + skip, count, ..note.run };
            self.put(run, note.at.map(|at| at + skip), ram, &mut buffer)?;
        }
        Ok(())
    }

    /// Copies the pages from page `at` of the arena on, or zeros, to `run`.
    fn put(
        &self,
        run: PageRun,
        at: Option<u64>,
        ram: &GuestRam,
        buffer: &mut [u8],
    ) -> Result<(), MigrationError> {
        let block = ram.block(run.block);
        let Some(at) = at else {
            block.zero_present_pages(run.first, run.count)?;
            return Ok(());
        };
        let (mut from, mut to) = (at * PAGE_SIZE as u64, run.first * PAGE_SIZE as u64);
        let mut left = run.count as usize * PAGE_SIZE;
        while left > 0 {
            let piece = &mut buffer[..left.min(COPIED)];
            self.arena.read(from, piece)?;
            block.write(to, piece)?;
            let length = piece.len();
            (from, to, left) = (from + length as u64, to + length as u64, left - length);
        }
        Ok(())
    }

    /// Drops all pages.
    pub(super) fn clear(&self) {
        for lane in &self.lanes {
            let mut lane = lane.lock();
            for note in lane.notes.drain(..) {
                self.came.block(note.run.block).clear_range(note.run.first, note.run.count);
            }
            lane.open.clear();
            lane.round = 0;
            lane.sums = PageSums::default();
        }
        self.next.store(0, Ordering::Release);
        self.notes.store(0, Ordering::Release);
    }

    fn bytes(&self) -> u64 {
        self.bytes_of(self.next.load(Ordering::Acquire), self.notes.load(Ordering::Acquire))
    }

    fn bytes_of(&self, pages: u64, notes: u64) -> u64 {
        pages.saturating_mul(PAGE_SIZE as u64).saturating_add(notes.saturating_mul(size_of::<Note>() as u64))
    }

    fn full(&self) -> MigrationError {
        MigrationError::JournalFull { limit_bytes: self.limit_bytes }
    }
}

impl LaneNotes {
    /// The lane's notes of that round. Notes are sorted by round.
    fn of_round(&self, round: u32) -> &[Note] {
        let first = self.notes.partition_point(|note| note.round < round);
        let end = self.notes.partition_point(|note| note.round <= round);
        &self.notes[first..end]
    }

    /// Adds a note. Returns false if the run extends the lane's last note instead.
    fn note(&mut self, run: PageRun, at: Option<u64>) -> bool {
        let round = self.round;
        if let Some(last) = self.notes.last_mut()
            && last.round == round
            && last.run.block == run.block
            && last.run.end() == run.first
            && last.at.map(|at| at + last.run.count) == at
        {
            last.run.count += run.count;
            return false;
        }
        self.notes.push(Note { round, run, at });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna::error::Misbehaviour;

    const PAGES: u64 = 64;

    fn run(first: u64, count: u64) -> PageRun {
        PageRun { block: 0, first, count }
    }

    fn guest() -> GuestRam {
        guest_of(PAGES)
    }

    fn guest_of(pages: u64) -> GuestRam {
        let length = pages * PAGE_SIZE as u64;
        GuestRam::new(vec![RamBlock::new("m0", length, Backing::Memfd).unwrap()]).unwrap()
    }

    fn put(journal: &Journal, lane: usize, run: PageRun, content: u8) {
        let place = journal.prepare(lane, run).unwrap();
        place.copy_from(&vec![content; place.len()]).unwrap();
        journal.commit(lane, run).unwrap();
    }

    fn first_bytes(ram: &GuestRam) -> Vec<u8> {
        let mut byte = [0];
        (0..PAGES)
            .map(|page| {
                ram.block(0).read(page * PAGE_SIZE as u64, &mut byte).unwrap();
                byte[0]
            })
            .collect()
    }

    #[test]
    fn nothing_reaches_ram_before_it_is_applied_and_rounds_are_applied_in_order() {
        let ram = guest();
        let journal = Journal::new(&ram, 1 << 20, 2).unwrap();
        // The second lane's page of the first round is older than the first lane's page of the second round.
        journal.settle(0);
        put(&journal, 0, run(5, 3), 2);
        put(&journal, 1, run(4, 3), 1);
        journal.zero(1, run(20, 2)).unwrap();
        journal.settle(1);
        put(&journal, 1, run(20, 1), 9);
        assert_eq!(first_bytes(&ram), vec![0; PAGES as usize]);

        journal.apply(&ram).unwrap();
        journal.apply(&ram).unwrap();

        let bytes = first_bytes(&ram);
        assert_eq!((&bytes[4..8], &bytes[20..22]), (&[1, 2, 2, 2][..], &[9, 0][..]));
        let brought = journal.brought();
        assert_eq!((brought.normal_pages, brought.zero_pages), (7, 2));
        journal.clear();
        assert_eq!(journal.brought(), Brought::default());
    }

    #[test]
    fn large_checkpoint_is_applied_whole_by_several_threads() {
        let ram = guest_of(10_000);
        let journal = Journal::new(&ram, 64 << 20, 2).unwrap();
        // Runs of different lengths on both lanes, from the last to the first, with zeros among them. The second
        // round repeats some of them.
        let content = |page: u64, round: u64| (page * 7 + round * 101) as u8 | 1;
        for (lane, round) in [(0, 0), (1, 0), (1, 1)] {
            if round == 1 {
                (0..2).for_each(|lane| journal.settle(lane));
            }
            for index in (0..1000u64).rev().filter(|index| round == 0 || index % 3 == 0) {
                let run = run(index * 10 + lane as u64 * 5, 1 + index % 4);
                put(&journal, lane, run, content(run.first, round));
                if index % 16 == 0 {
                    journal.zero(lane, PageRun { first: run.end(), count: 1, ..run }).unwrap();
                }
            }
        }
        (0..10_000).for_each(|page| ram.block(0).write(page * PAGE_SIZE as u64, &[0xee]).unwrap());

        journal.apply(&ram).unwrap();

        for index in 0..1000u64 {
            for lane in 0..2u64 {
                let (first, count) = (index * 10 + lane * 5, 1 + index % 4);
                let round = u64::from(lane == 1 && index % 3 == 0);
                for page in first..first + 5 {
                    let mut byte = [0];
                    ram.block(0).read(page * PAGE_SIZE as u64, &mut byte).unwrap();
                    let due = match page - first {
                        place if place < count => content(first, round),
                        place if place == count && index % 16 == 0 => 0,
                        _ => 0xee,
                    };
                    assert_eq!(byte[0], due, "page {page}");
                }
            }
        }
    }

    #[test]
    fn page_that_comes_again_as_a_difference_is_read_from_the_journal() {
        let journal = Journal::new(&guest(), 1 << 20, 1).unwrap();
        put(&journal, 0, run(3, 4), 7);
        journal.zero(0, run(5, 1)).unwrap();
        let mut page = [1; PAGE_SIZE];

        assert!(!journal.current(0, 0, 9, &mut page).unwrap());
        assert_eq!(page, [1; PAGE_SIZE]);
        assert!(journal.current(0, 0, 4, &mut page).unwrap());
        assert_eq!(page, [7; PAGE_SIZE]);
        assert!(journal.current(0, 0, 5, &mut page).unwrap());
        assert_eq!(page, [0; PAGE_SIZE]);
    }

    #[test]
    fn difference_to_a_page_that_another_channel_has_brought_is_refused() {
        let journal = Journal::new(&guest(), 1 << 20, 2).unwrap();
        put(&journal, 0, run(3, 4), 7);
        let refused = journal.current(1, 0, 4, &mut [0; PAGE_SIZE]);
        let error = refused.expect_err("another channel has brought it");
        let because = BadPage::DifferenceToOtherChannel { block: 0, page: 4 };
        assert!(
            matches!(&error, MigrationError::PeerMisbehaved(Misbehaviour::Page(page)) if *page == because),
            "{error}"
        );
    }

    #[test]
    fn more_than_the_limit_is_refused_whatever_it_is_made_of() {
        let journal = Journal::new(&guest_of(10_000), 8 * PAGE_SIZE as u64, 1).unwrap();
        put(&journal, 0, run(0, 8), 1);
        assert!(matches!(journal.prepare(0, run(8, 1)), Err(MigrationError::JournalFull { .. })));
        journal.clear();
        // Zero pages with gaps: each page needs its own note.
        let refused = (0..).find_map(|index| journal.zero(0, run(index * 2, 1)).err());
        assert!(matches!(refused, Some(MigrationError::JournalFull { limit_bytes: 0x8000 })), "{refused:?}");
        journal.clear();
        // Zero pages without gaps need one note.
        (0..10_000).for_each(|index| journal.zero(0, run(index, 1)).unwrap());
    }
}
