//! Simulates a source, a destination and their failures, without a network and without memory: a page is a
//! number.
//!
//! The record is the engine's own code. So is the choice of the pages that are sent again after a loss
//! ([`Unconfirmed`], [`HeldPages`]). A schedule is one to three migrations into the same memory. Each migration
//! has some sessions, and ends with a commit or a failure.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;

use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, Run};

use super::super::{Memory, Record};
use crate::order::PageRun;
use crate::reconnect::{HeldPages, Unconfirmed};

/// The content of a page. 0: the page is zero.
type Content = u16;

/// The content of a page of which half was received when the connection was lost.
const HALF: Content = Content::MAX;
/// Pages of each block. The second block may have bytes of the VMM, which stay where no page is received.
const PAGES: [u64; 2] = [67, 5];
const ROM: usize = 1;
/// Most sessions of a migration. The connection of the last one is not lost.
const MOST_SESSIONS: u32 = 5;

/// A planted bug of the record, or of its use by the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planted {
    /// When all pages were received, the received pages lose their mark *may hold bytes*.
    FinishForgetsWhatCame,
    /// When all pages were received, the others keep the bytes of an earlier guest.
    FinishClearsNothing,
    /// After a lost connection no page counts as received.
    LossForgetsWhatCame,
    /// After a lost connection no page is marked as possibly holding bytes.
    LossForgetsBytes,
    /// A page is marked as possibly holding bytes only after all its bytes were stored.
    MarksAfterBytes,
    /// A zero is not stored if the page was received before.
    ZeroChangesNothingThatCame,
    /// A page counts as zero although storing zeros failed.
    FailedZeroCounts,
    /// Pages that are in memory before the first page is received are not marked.
    LooksAway,
    /// A page that an adapter may write keeps no mark after it was zero once.
    ForgetsAdapters,
    /// After a failed migration only received pages are cleared.
    EmptyLeavesWhatWasThere,
}

pub(super) const PLANTED: [Planted; 10] = [
    Planted::FinishForgetsWhatCame,
    Planted::FinishClearsNothing,
    Planted::LossForgetsWhatCame,
    Planted::LossForgetsBytes,
    Planted::MarksAfterBytes,
    Planted::ZeroChangesNothingThatCame,
    Planted::FailedZeroCounts,
    Planted::LooksAway,
    Planted::ForgetsAdapters,
    Planted::EmptyLeavesWhatWasThere,
];

/// The property that a schedule has violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// The guest starts, and a page differs from the source's.
    Differs { block: usize, page: u64, is: Content, wanted: Content },
    /// The migration has failed, and a page is not zero.
    Left { block: usize, page: u64, is: Content },
}

/// Blocks with [`PAGES`] pages. Their memory is not accessed.
pub(super) fn geometry() -> &'static GuestRam {
    static GEOMETRY: OnceLock<GuestRam> = OnceLock::new();
    GEOMETRY.get_or_init(|| {
        let block = |(index, pages): (usize, u64)| {
            RamBlock::new(format!("b{index}"), pages * PAGE_SIZE as u64, Backing::Anonymous).unwrap()
        };
        GuestRam::new(PAGES.into_iter().enumerate().map(block).collect()).unwrap()
    })
}

/// The destination's memory, which stores one number per page.
struct Bytes {
    pages: Vec<Vec<Cell<Content>>>,
    /// Pages that an adapter may write.
    pinned: RefCell<Vec<PageRun>>,
    /// Number of successful stores of zeros, after which storing fails.
    zeros_left: Cell<u32>,
    knows_adapters: bool,
}

impl Bytes {
    fn set(&self, block: usize, page: u64, content: Content) {
        self.pages[block][page as usize].set(content);
    }

    fn get(&self, block: usize, page: u64) -> Content {
        self.pages[block][page as usize].get()
    }

    fn is_pinned(&self, block: usize, page: u64) -> bool {
        self.pinned.borrow().iter().any(|run| run.block == block && (run.first..run.end()).contains(&page))
    }
}

impl Memory for Bytes {
    type Error = ();

    fn zero(&self, run: PageRun) -> Result<(), ()> {
        self.zeros_left.set(self.zeros_left.get().checked_sub(1).ok_or(())?);
        (run.first..run.end()).for_each(|page| self.set(run.block, page, 0));
        Ok(())
    }

    fn pinned_in(&self, run: PageRun) -> Option<Run> {
        let is_pinned = |page: &u64| self.knows_adapters && self.is_pinned(run.block, *page);
        let first = (run.first..run.end()).find(is_pinned)?;
        let end = (first..run.end()).find(|page| !is_pinned(page)).unwrap_or(run.end());
        Some(Run { first, count: end - first })
    }
}

/// The source's guest, which writes and frees pages.
struct Guest {
    pages: Vec<Vec<Content>>,
    dirty: DirtyBitmaps,
    /// Pages that were never sent, and the content that the destination must have for them.
    left_out: Vec<Vec<Option<Content>>>,
    last: Content,
}

impl Guest {
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut last = 0;
        let mut content = |random: &mut fastrand::Rng| match random.u8(..) {
            ..96 => 0,
            _ => {
                last += 1;
                last
            }
        };
        let pages = PAGES.map(|pages| (0..pages).map(|_| content(random)).collect()).to_vec();
        let left_out = PAGES.map(|pages| vec![None; pages as usize]).to_vec();
        Self { pages, dirty: DirtyBitmaps::new(geometry()), left_out, last }
    }

    /// The guest writes some pages, and frees others, which become zero.
    fn write(&mut self, random: &mut fastrand::Rng, most: usize) {
        for _ in 0..random.usize(..most) {
            let block = random.usize(..PAGES.len());
            let page = random.u64(..PAGES[block]);
            let zero = random.u8(..) < 120;
            self.last += u16::from(!zero);
            self.pages[block][page as usize] = if zero { 0 } else { self.last };
            self.left_out[block][page as usize] = None;
            self.dirty.block(block).set(page);
        }
    }

    fn take_dirty(&mut self) -> DirtyBitmaps {
        std::mem::replace(&mut self.dirty, DirtyBitmaps::new(geometry()))
    }
}

/// The state of one migration on both sides.
struct Migration {
    guest: Guest,
    record: Record,
    unconfirmed: Unconfirmed,
    held: HeldPages,
    session: u32,
    /// An adapter writes the pages. Such a migration cannot reconnect.
    is_rdma: bool,
    /// Number of pages that are received before the connection is lost.
    budget: u64,
}

/// How a session, or a part of it, ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    Lost,
    Failed,
}

pub(super) struct World {
    random: fastrand::Rng,
    planted: Option<Planted>,
    memory: Bytes,
    has_rom: bool,
}

impl World {
    pub(super) fn new(seed: u64, planted: Option<Planted>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let memory = Bytes {
            pages: PAGES.map(|pages| vec![Cell::new(0); pages as usize]).to_vec(),
            pinned: RefCell::default(),
            zeros_left: Cell::new(u32::MAX),
            knows_adapters: planted != Some(Planted::ForgetsAdapters),
        };
        let has_rom = random.bool();
        Self { random, planted, memory, has_rom }
    }

    pub(super) fn run(&mut self) -> Result<(), Broken> {
        for _ in 0..self.random.u8(1..=3) {
            self.migrate()?;
            // Bytes remain in memory: a guest has run in it, or emptying it has left some.
            if self.random.bool() {
                let left = self.random.u16(1..HALF);
                self.memory.set(0, self.random.u64(..PAGES[0]), left);
            }
        }
        Ok(())
    }

    fn migrate(&mut self) -> Result<(), Broken> {
        let mut migration = self.begin();
        let mut round = self.first_round(&mut migration);
        loop {
            match self.session(&mut migration, round) {
                End::Whole => return self.check_arrived(&migration),
                End::Failed => return self.fail(&migration),
                End::Lost => {
                    self.suspend(&migration);
                    // The guest was paused during the loss, or it ran. It may have written pages in both cases.
                    migration.guest.write(&mut self.random, 40);
                    round = self.reconnect(&mut migration);
                }
            }
        }
    }

    fn begin(&mut self) -> Migration {
        if self.has_rom {
            (0..PAGES[ROM]).for_each(|page| self.memory.set(ROM, page, HALF - 1));
        }
        let record = Record::new(geometry());
        let is_zero = |block: usize| self.memory.pages[block].iter().all(|content| content.get() == 0);
        for (block, pages) in PAGES.into_iter().enumerate() {
            // Three cases: the owner declares the memory fresh, the kernel reports the absent pages, or the
            // kernel cannot.
            let is_fresh = is_zero(block) && self.random.u8(..3) == 0;
            if is_fresh || self.planted == Some(Planted::LooksAway) {
                continue;
            }
            let (absent, knows) = (PageBitmap::new(pages), self.random.u8(..) > 20);
            for page in 0..pages {
                if knows && self.memory.get(block, page) == 0 && self.random.u8(..) > 40 {
                    absent.set(page);
                }
            }
            record.found(block, &absent);
        }
        self.memory.zeros_left.set(match self.random.u8(..) {
            ..30 => self.random.u32(..60),
            _ => u32::MAX,
        });
        self.memory.pinned.borrow_mut().clear();
        Migration {
            guest: Guest::new(&mut self.random),
            record,
            unconfirmed: Unconfirmed::new(geometry()),
            held: HeldPages::new(geometry()),
            session: 0,
            is_rdma: self.random.u8(..) < 40,
            budget: 0,
        }
    }

    /// The first round: all pages, except some that the guest does not use or that the source does not have.
    fn first_round(&mut self, migration: &mut Migration) -> DirtyBitmaps {
        let round = DirtyBitmaps::new(geometry());
        round.set_all();
        let most = if self.random.bool() { 12 } else { 1 };
        for _ in 0..self.random.usize(..most) {
            let block = self.random.usize(..PAGES.len());
            let page = self.random.u64(..PAGES[block]);
            round.block(block).clear(page);
            let stays = self.has_rom && block == ROM;
            let there = if stays { self.memory.get(block, page) } else { 0 };
            migration.guest.left_out[block][page as usize] = Some(there);
        }
        round
    }

    /// Sends rounds until the connection is lost or everything is loaded. The guest is paused during the last
    /// round.
    fn session(&mut self, migration: &mut Migration, first: DirtyBitmaps) -> End {
        let is_last = migration.session >= MOST_SESSIONS || migration.is_rdma;
        migration.budget = if is_last || self.random.bool() { u64::MAX } else { self.random.u64(..200) };
        let most_rounds = if migration.is_rdma { 6 } else { 3 };
        let (mut round, rounds) = (first, self.random.u8(1..=most_rounds));
        for number in 1..=rounds {
            migration.unconfirmed.begin_round(&round, false);
            match self.send(migration, &round, number == rounds) {
                End::Whole => {}
                End::Lost => {
                    // The source's lanes have begun more rounds than the destination has received.
                    while self.random.u8(..3) == 0 {
                        migration.guest.write(&mut self.random, 20);
                        migration.unconfirmed.begin_round(&migration.guest.take_dirty(), false);
                    }
                    return End::Lost;
                }
                End::Failed => return End::Failed,
            }
            migration.held.round_ended();
            if self.random.bool() {
                migration.unconfirmed.confirmed().expect("a round that has ended");
            }
            if number < rounds {
                migration.guest.write(&mut self.random, 30);
                round = migration.guest.take_dirty();
            }
        }
        if self.finish(migration).is_err() {
            return End::Failed;
        }
        match self.random.u8(..) {
            // *Prepare* is not answered, or the answer is lost.
            ..140 if !is_last => End::Lost,
            // A hook could not be acquired.
            ..160 => End::Failed,
            _ => End::Whole,
        }
    }

    /// Sends the pages of a round. The pages of several lanes arrive in any order.
    fn send(&mut self, migration: &mut Migration, round: &DirtyBitmaps, stands: bool) -> End {
        let mut runs = Vec::new();
        for (block, pages) in round.blocks().iter().enumerate() {
            let mut from = 0;
            while let Some(Run { first, count }) = pages.next_run(from, pages.pages(), self.random.u64(1..9))
            {
                runs.push(PageRun { block, first, count });
                from = first + count;
            }
        }
        while !runs.is_empty() {
            let lane = self.random.usize(..runs.len().min(3));
            let mut run = Some(runs.remove(lane));
            if !stands && self.random.u8(..) < 30 {
                migration.guest.write(&mut self.random, 8);
            }
            while let Some(rest) = run {
                let page = |page: u64| migration.guest.pages[rest.block][page as usize];
                // The source does not always look for zero pages.
                let is_zero = page(rest.first) == 0 && self.random.u8(..) > 10;
                let same = |at: &u64| (page(*at) == 0) == (page(rest.first) == 0);
                let count = (rest.first..rest.end()).take_while(same).count() as u64;
                let (part, after) = rest.split(count);
                let end = if is_zero { self.zeros(migration, part) } else { self.content(migration, part) };
                if end != End::Whole {
                    return end;
                }
                migration.held.came(part.block, part.first, part.count);
                run = after;
            }
        }
        End::Whole
    }

    fn zeros(&self, migration: &mut Migration, run: PageRun) -> End {
        if migration.budget == 0 {
            return End::Lost;
        }
        migration.budget -= 1;
        let record = &migration.record;
        if self.planted == Some(Planted::ZeroChangesNothingThatCame)
            && record.received().block(run.block).count_range(run.first, run.count) == run.count
        {
            return End::Whole;
        }
        match record.zero(run, &self.memory) {
            Ok(_) => End::Whole,
            Err(()) => {
                if self.planted == Some(Planted::FailedZeroCounts) {
                    record.may_hold.block(run.block).clear_range(run.first, run.count);
                }
                End::Failed
            }
        }
    }

    fn content(&self, migration: &mut Migration, run: PageRun) -> End {
        let (record, late) = (&migration.record, self.planted == Some(Planted::MarksAfterBytes));
        let is_pinned = (run.first..run.end()).all(|page| self.memory.is_pinned(run.block, page));
        if !is_pinned && !late {
            record.content(run);
        }
        if migration.is_rdma && !is_pinned {
            // From now on this side does not notice writes to these pages.
            self.memory.pinned.borrow_mut().push(run);
        }
        for page in run.first..run.end() {
            if migration.budget == 0 {
                self.memory.set(run.block, page, HALF);
                return End::Lost;
            }
            migration.budget -= 1;
            self.memory.set(run.block, page, migration.guest.pages[run.block][page as usize]);
        }
        if late {
            record.content(run);
        }
        End::Whole
    }

    /// Completes the loading as the sink does.
    fn finish(&self, migration: &Migration) -> Result<(), ()> {
        let record = &migration.record;
        // The adapter's right to write was removed.
        self.memory.pinned.borrow_mut().clear();
        for block in (0..PAGES.len()).filter(|block| !(self.has_rom && *block == ROM)) {
            match self.planted {
                Some(Planted::FinishClearsNothing) => continue,
                Some(Planted::FinishForgetsWhatCame) => {
                    let (held, came) = (record.may_hold.block(block), record.received.block(block));
                    for page in (0..PAGES[block]).filter(|page| came.get(*page)) {
                        held.clear(page);
                    }
                }
                _ => {}
            }
            record.finish(block, &self.memory)?;
        }
        Ok(())
    }

    fn suspend(&self, migration: &Migration) {
        match self.planted {
            Some(Planted::LossForgetsWhatCame) => migration.record.received.clear_all(),
            Some(Planted::LossForgetsBytes) => migration.record.may_hold.clear_all(),
            _ => {}
        }
    }

    /// The source reconnects. Returns the first round of the session.
    fn reconnect(&mut self, migration: &mut Migration) -> DirtyBitmaps {
        migration.session += 1;
        if self.random.u8(..) < 50 {
            // The destination had all channels of an attempt that the source has abandoned.
            migration.held.begin_session(migration.session);
            migration.session += 1;
        }
        let session = migration.session;
        let missing = migration.unconfirmed.begin_session(session, &migration.held.report());
        let mut missing = missing.expect("an answer that is true");
        missing.pages.or_from(&migration.guest.take_dirty());
        migration.held.begin_session(session);
        missing.pages
    }

    fn check_arrived(&self, migration: &Migration) -> Result<(), Broken> {
        for (block, pages) in PAGES.into_iter().enumerate() {
            for page in 0..pages {
                let (guest, is) = (&migration.guest, self.memory.get(block, page));
                let wanted =
                    guest.left_out[block][page as usize].unwrap_or(guest.pages[block][page as usize]);
                if is != wanted {
                    return Err(Broken::Differs { block, page, is, wanted });
                }
            }
        }
        Ok(())
    }

    fn fail(&self, migration: &Migration) -> Result<(), Broken> {
        self.memory.pinned.borrow_mut().clear();
        self.memory.zeros_left.set(u32::MAX);
        for (block, pages) in PAGES.into_iter().enumerate() {
            if self.planted == Some(Planted::EmptyLeavesWhatWasThere) {
                let record = &migration.record;
                let (held, came) = (record.may_hold.block(block), record.received.block(block));
                for page in (0..pages).filter(|page| !came.get(*page)) {
                    held.clear(page);
                }
            }
            let emptied = migration.record.empty(block, &self.memory);
            emptied.expect("zeros can be stored again");
        }
        for (block, pages) in PAGES.into_iter().enumerate() {
            let left = (0..pages).find(|page| self.memory.get(block, *page) != 0);
            if let Some(page) = left {
                return Err(Broken::Left { block, page, is: self.memory.get(block, page) });
            }
        }
        Ok(())
    }
}
