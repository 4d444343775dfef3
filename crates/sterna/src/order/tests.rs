//! Tests of single rounds: which lane takes which page, and what is re-armed before.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sterna_ram::dirty::SoftwareLog;
use sterna_ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, SyncReport,
};

use super::{LaneCursor, Next, PageRun, RoundPages, RoundQueue, SliceSize, Taken};

/// Pages of a slice of the default size (`order::slice_size`).
const SLICE_PAGES: u64 = 16 * 1024;

/// Three blocks: one with two slices and a part, one smaller than a chunk, one with a chunk and a part. No page
/// is populated.
fn ram() -> GuestRam {
    let block = |name: &str, pages: u64| {
        RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Memfd).expect("a block")
    };
    GuestRam::new(vec![block("a", 2 * SLICE_PAGES + 77), block("b", 3), block("c", 600)]).unwrap()
}

/// Records the re-armed ranges. Re-arming can be slow, or fail.
#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<(usize, u64, u64)>>,
    /// Pages re-armed so far, by calls that have returned.
    done: Mutex<Vec<(usize, u64, u64)>>,
    slow: bool,
    fails: bool,
}

impl DirtySource for Recorder {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }
    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }
    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }
    fn rearm(&self, block: usize, first: u64, count: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        self.calls.lock().unwrap().push((block, first, count));
        if self.fails {
            return Err(DirtyError::NotStarted { origin: "recorder" });
        }
        if self.slow {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.done.lock().unwrap().push((block, first, count));
        Ok(())
    }
    fn name(&self) -> &'static str {
        "recorder"
    }
}

impl Recorder {
    fn covers(&self, run: PageRun) -> bool {
        let done = self.done.lock().unwrap();
        done.iter().any(|&(block, first, count)| {
            block == run.block && first <= run.first && run.end() <= first + count
        })
    }
}

fn take_all(round: &RoundPages, ram: &GuestRam, dirty: &dyn DirtySource, most: u64) -> Vec<Taken> {
    let mut at = LaneCursor::default();
    std::iter::from_fn(|| round.take(&mut at, most, ram, dirty).expect("taking")).collect()
}

/// Every `step`th page of every block.
fn some(ram: &GuestRam, step: usize) -> DirtyBitmaps {
    let bits = DirtyBitmaps::new(ram);
    for (index, block) in ram.blocks().iter().enumerate() {
        (0..block.pages()).step_by(step).for_each(|page| {
            bits.block(index).set(page);
        });
    }
    bits
}

#[test]
fn round_over_many_lanes_gives_each_page_to_exactly_one() {
    let ram = ram();
    for step in [1, 2, 5, 511] {
        let pages = some(&ram, step).count();
        let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, step), false);
        let mut taken = DirtyBitmaps::new(&ram);
        let total = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for lane in 0..8 {
                let (round, ram, taken, total) = (&round, &ram, &taken, &total);
                scope.spawn(move || {
                    for Taken { run, absent } in take_all(round, ram, &Recorder::default(), 1 + lane * 40) {
                        assert!(run.count > 0 && !absent);
                        let new = taken.block(run.block).set_range(run.first, run.count);
                        assert_eq!(new, run.count, "pages of {run:?} were taken twice");
                        total.fetch_add(run.count, Ordering::Relaxed);
                    }
                });
            }
        });
        let wanted = some(&ram, step);
        assert_eq!(total.into_inner(), pages);
        assert_eq!(taken.or_from(&wanted), 0, "pages were left out");
        assert_eq!(round.remaining_pages(), 0);
        assert!(round.is_rearmed());
    }
}

#[test]
fn lane_takes_no_more_than_it_asked_for() {
    let ram = ram();
    let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 1), false);
    for Taken { run, .. } in take_all(&round, &ram, &Recorder::default(), 128) {
        assert!(run.count <= 128, "{run:?}");
    }
}

#[test]
fn slice_is_rearmed_once_and_whole_before_any_lane_reads_from_it() {
    let ram = ram();
    let dirty = Recorder { slow: true, ..Recorder::default() };
    let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 3), false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut at = LaneCursor::default();
                while let Some(taken) = round.take(&mut at, 128, &ram, &dirty).expect("taking") {
                    assert!(dirty.covers(taken.run), "{taken:?} was given out before it was re-armed");
                }
            });
        }
    });
    let mut calls = dirty.calls.into_inner().unwrap();
    calls.sort_unstable();
    assert_eq!(
        calls,
        [
            (0, 0, SLICE_PAGES),
            (0, SLICE_PAGES, SLICE_PAGES),
            (0, 2 * SLICE_PAGES, 77),
            (1, 0, 3),
            (2, 0, 600)
        ]
    );
}

#[test]
fn slice_without_a_page_of_the_round_is_not_rearmed() {
    let ram = ram();
    let bits = DirtyBitmaps::new(&ram);
    bits.block(0).set(SLICE_PAGES + 5);
    let dirty = Recorder::default();
    let round = RoundPages::new(1, &ram, SliceSize::default(), bits, false);
    let taken = take_all(&round, &ram, &dirty, 128);
    assert_eq!(taken.len(), 1);
    assert_eq!(*dirty.calls.lock().unwrap(), [(0, SLICE_PAGES, SLICE_PAGES)]);
    assert!(round.is_rearmed());
}

#[test]
fn write_between_sync_and_rearming_is_kept_for_the_next_round() {
    let ram = ram();
    let log = SoftwareLog::new(&ram);
    log.start().unwrap();
    log.mark(2, 10);
    let mut synced = DirtyBitmaps::new(&ram);
    log.sync(&mut synced).unwrap();
    // Written after the sync, in the same slice: the round must not clear it when it re-arms.
    log.mark(2, 11);
    let round = RoundPages::new(1, &ram, SliceSize::default(), synced, false);
    let taken = take_all(&round, &ram, &log, 128);
    assert_eq!(taken, [Taken { run: PageRun { block: 2, first: 10, count: 1 }, absent: false }]);
    let mut next = DirtyBitmaps::new(&ram);
    log.sync(&mut next).unwrap();
    assert_eq!(next.count(), 1);
    assert!(next.block(2).get(11));
}

#[test]
fn report_of_an_unsent_page_is_dropped_unless_the_page_will_not_be_read() {
    let ram =
        GuestRam::new(vec![RamBlock::new("one chunk", 300 * PAGE_SIZE as u64, Backing::Memfd).unwrap()])
            .unwrap();
    // This page is populated, so it will be read. All others are absent.
    ram.block(0).write(9 * PAGE_SIZE as u64, &[1]).unwrap();
    let all = DirtyBitmaps::new(&ram);
    all.set_all();
    let round = RoundPages::new(1, &ram, SliceSize::default(), all, true);
    let mut reported = DirtyBitmaps::new(&ram);
    [3, 7, 9].into_iter().for_each(|page| {
        reported.block(0).set(page);
    });
    // The absent pages are not known yet.
    assert_eq!(round.drop_unsent(&mut reported), 0);
    let mut at = LaneCursor::default();
    let dirty = Recorder::default();
    let first = round.take(&mut at, 5, &ram, &dirty).unwrap().unwrap();
    assert_eq!((first.run.first, first.run.count, first.absent), (0, 5, true));

    let dropped = round.drop_unsent(&mut reported);

    assert_eq!(dropped, 1);
    let left: Vec<u64> = (0..12).filter(|page| reported.block(0).get(*page)).collect();
    assert_eq!(left, [3, 7], "3 is sent, 7 was found absent and will be sent as zero, 9 will be read");
}

#[test]
fn free_pages_are_not_given_out_and_what_is_reported_of_them_is_kept() {
    let ram = ram();
    let dirty = Recorder::default();
    let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 1), false).taking_hints(&ram);
    let mut slices = 0;
    while round.prepare(slices, &ram, &dirty).unwrap() {
        slices += 1;
    }
    assert_eq!(slices, 5, "three slices of the first block, and one of each other");
    let mut at = LaneCursor::default();
    assert_eq!(round.take(&mut at, 5, &ram, &dirty).unwrap().unwrap().run.count, 5);
    // Pages in a claimed chunk, pages from the middle of another chunk on, and all pages of a block.
    round.hint(0, 3, 100);
    round.hint(0, 1000, 2000);
    round.hint(1, 0, 3);

    let mut reported = DirtyBitmaps::new(&ram);
    for page in [4, 500, 1001, 4000] {
        reported.block(0).set(page);
    }
    assert_eq!(round.drop_unsent(&mut reported), 2);
    let left: Vec<u64> = (0..5000).filter(|page| reported.block(0).get(*page)).collect();
    assert_eq!(left, [4, 1001], "4 is sent, 1001 is free, the others will be read");

    assert_eq!(round.take(&mut at, u64::MAX, &ram, &dirty).unwrap().unwrap().run.count, 507);
    let taken = take_all(&round, &ram, &dirty, u64::MAX);
    let total = 2 * SLICE_PAGES + 77 + 3 + 600;
    let is_free = |run: &PageRun| run.block == 1 || run.first < 3000 && run.end() > 1000 && run.block == 0;
    assert!(taken.iter().all(|taken| !is_free(&taken.run)), "{taken:?}");
    assert_eq!(taken.iter().map(|taken| taken.run.count).sum::<u64>() + 512, total - 2003);
    assert_eq!((round.remaining_pages(), round.pages()), (0, total));
    assert_eq!(dirty.calls.lock().unwrap().len(), 5, "each slice is re-armed once");
}

#[test]
fn failed_rearming_gives_out_no_page_to_any_lane() {
    let ram = ram();
    let dirty = Recorder { fails: true, ..Recorder::default() };
    let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 1), false);
    for _ in 0..2 {
        let error = round.take(&mut LaneCursor::default(), 128, &ram, &dirty).unwrap_err();
        assert!(error.to_string().contains("recorder"), "{error}");
    }
}

#[test]
fn absent_pages_are_given_out_apart_from_populated_ones() {
    let ram = ram();
    let populated = [(0, 0), (0, 3), (0, 4), (0, SLICE_PAGES), (0, 2 * SLICE_PAGES + 76), (2, 599)];
    for (block, page) in populated {
        ram.block(block).write(page * PAGE_SIZE as u64, &[1]).unwrap();
    }
    let round = RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 1), true);
    let taken = take_all(&round, &ram, &Recorder::default(), 128);
    let mut present = Vec::new();
    let mut absent = 0;
    for Taken { run, absent: is_absent } in taken {
        if is_absent {
            absent += run.count;
        } else {
            present.extend((run.first..run.end()).map(|page| (run.block, page)));
        }
    }
    // A kernel may populate pages next to a written one. The written pages must be included, and no page may be
    // lost.
    assert!(populated.iter().all(|place| present.contains(place)), "{present:?}");
    assert_eq!(absent + present.len() as u64, ram.total_bytes() / PAGE_SIZE as u64);
    assert!(present.len() < 5000, "{} pages count as populated", present.len());
    assert_eq!(round.remaining_pages(), 0);
}

#[test]
fn queue_gives_rounds_in_order_and_ends() {
    let ram = ram();
    let queue = RoundQueue::default();
    let round = |number| {
        std::sync::Arc::new(RoundPages::new(number, &ram, SliceSize::default(), some(&ram, 99), false))
    };
    queue.publish(round(1));
    queue.publish(round(2));
    let nothing = || None::<()>;
    let next = |after, after_flush| match queue.next(after, after_flush, nothing) {
        Some(Next::Round(round)) => Some(round.number()),
        Some(Next::Other(())) | None => None,
    };
    assert_eq!(next(0, false), Some(1));
    assert_eq!(next(1, false), Some(2));
    std::thread::scope(|scope| {
        let after_flush = scope.spawn(|| next(1, true));
        queue.flushed(1);
        assert_eq!(after_flush.join().unwrap(), Some(2));
        let waiting = scope.spawn(|| next(2, false));
        queue.end();
        assert_eq!(waiting.join().unwrap(), None);
    });
}

#[test]
fn queue_gives_something_else_only_when_no_round_waits() {
    let ram = ram();
    let queue = RoundQueue::default();
    queue.publish(std::sync::Arc::new(RoundPages::new(1, &ram, SliceSize::default(), some(&ram, 99), false)));

    assert!(matches!(queue.next(0, false, || Some("chunk")), Some(Next::Round(_))));
    assert!(matches!(queue.next(1, false, || Some("chunk")), Some(Next::Other("chunk"))));
    // A result that arrives while a lane waits.
    let found = std::sync::atomic::AtomicBool::new(false);
    let look = || found.load(std::sync::atomic::Ordering::Acquire).then_some("late");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| matches!(queue.next(1, false, look), Some(Next::Other("late"))));
        found.store(true, std::sync::atomic::Ordering::Release);
        queue.wake(true);
        assert!(waiting.join().unwrap());
    });
}
