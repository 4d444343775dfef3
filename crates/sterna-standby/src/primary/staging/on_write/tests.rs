//! Staged pages have the content of the moment of protection, whichever thread writes them.
//!
//! No thread blocks without end.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use sterna_ram::{Backing, DirtyBitmaps, PAGE_SIZE};

use super::super::pieces::{bytes, laid, runs_of};
use super::*;

const PAGES: u64 = 2048;

fn ram(backing: Backing) -> GuestRam {
    let blocks = ["m0", "m1"].map(|name| RamBlock::new(name, bytes(PAGES), backing).unwrap());
    GuestRam::new(blocks.to_vec()).unwrap()
}

/// `None` if this host does not support copy-on-write.
#[allow(clippy::print_stderr, reason = "says what was not tested")]
fn begun(ram: &GuestRam) -> Option<CopyOnWrite> {
    let begun = CopyOnWrite::begin(ram);
    begun.inspect_err(|why| eprintln!("SKIPPED: {why}")).ok()
}

fn arena(pages: u64) -> RamBlock {
    RamBlock::new("arena", bytes(pages), Backing::Anonymous).unwrap()
}

/// Some pages of both blocks: long runs, short runs and single pages.
fn some_pages(ram: &GuestRam, random: &mut fastrand::Rng) -> DirtyBitmaps {
    let pages = DirtyBitmaps::new(ram);
    for block in 0..2 {
        for _ in 0..20 {
            let most = [4, 200][random.usize(0..2)];
            let (first, count) = (random.u64(0..PAGES), random.u64(1..most));
            pages.block(block).set_range(first, count.min(PAGES - first));
        }
    }
    pages
}

fn defer(
    on_write: &CopyOnWrite,
    ram: &GuestRam,
    arena: &RamBlock,
    pages: &DirtyBitmaps,
) -> (Arc<[Piece]>, Arc<Deferred>) {
    let pieces: Arc<[Piece]> = laid(&runs_of(pages), 0).into();
    let (spans, _) = on_write.spans(&pieces, 3);
    let deferred = on_write.defer((ram, arena), Arc::clone(&pieces), &spans).unwrap();
    (pieces, deferred)
}

fn read(block: &RamBlock, page: u64) -> Vec<u8> {
    let mut content = vec![0; PAGE_SIZE];
    block.read(bytes(page), &mut content).unwrap();
    content
}

/// Threads that write all pages of both blocks at full speed until stopped. They are paused by
/// [`Writers::stand`].
struct Writers {
    stops: Arc<AtomicBool>,
    standing: Arc<parking_lot::RwLock<()>>,
    threads: Vec<std::thread::JoinHandle<u64>>,
}

impl Writers {
    fn begin(ram: &GuestRam, seed: u64) -> Self {
        let (stops, standing) = (Arc::new(AtomicBool::new(false)), Arc::new(parking_lot::RwLock::new(())));
        let threads = (0..4).map(|number| {
            let (ram, stops, standing) = (ram.clone(), Arc::clone(&stops), Arc::clone(&standing));
            std::thread::spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed + number);
                let mut writes = 0;
                while !stops.load(SeqCst) {
                    let _runs = standing.read();
                    for _ in 0..16 {
                        let (block, page) = (random.usize(0..2), random.u64(0..PAGES));
                        let at = bytes(page) + random.u64(0..PAGE_SIZE as u64 / 8) * 8;
                        ram.block(block).write_u64(at, random.u64(..)).unwrap();
                        writes += 1;
                    }
                }
                writes
            })
        });
        let threads = threads.collect();
        Self { stops, standing, threads }
    }

    /// Pauses all writers until the guard is dropped, as vCPUs of a paused guest.
    fn stand(&self) -> parking_lot::RwLockWriteGuard<'_, ()> {
        self.standing.write()
    }

    fn end(self) -> u64 {
        self.stops.store(true, SeqCst);
        self.threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    }
}

#[test]
fn what_is_copied_later_is_what_was_there_when_the_guest_stood() {
    let mut random = sterna_testing::random("what_is_copied_later_is_what_was_there_when_the_guest_stood");
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let (ram, arena) = (ram(backing), arena(2 * PAGES));
        let Some(on_write) = begun(&ram) else { return };
        let writers = Writers::begin(&ram, random.u64(..));
        for turn in 0..30 {
            let pages = some_pages(&ram, &mut random);
            let standing = writers.stand();
            on_write.settle();
            let (pieces, deferred) = defer(&on_write, &ram, &arena, &pages);
            let was: Vec<_> = ram
                .blocks()
                .iter()
                .map(|block| (0..PAGES).map(|page| read(block, page)).collect::<Vec<_>>())
                .collect();
            drop(standing);
            // The pages are copied by the copying thread, by a thread that needs them, or by both and the
            // writers.
            if turn % 3 != 0 {
                on_write.go_on();
            }
            if turn % 3 != 1 {
                for piece in pieces.iter().rev() {
                    deferred.ensure(piece.run).unwrap();
                }
            }
            let began = Instant::now();
            while !deferred.is_finished() {
                assert!(began.elapsed() < Duration::from_secs(60), "it is not copied");
                std::thread::sleep(Duration::from_micros(100));
            }
            for piece in pieces.iter() {
                deferred.ensure(piece.run).unwrap();
                for page in 0..piece.run.count {
                    let (now, then) = (
                        read(&arena, piece.at + page),
                        &was[piece.run.block][(piece.run.first + page) as usize],
                    );
                    assert!(now == *then, "{backing:?}, turn {turn}: page {page} of {piece:?} is another");
                }
            }
        }
        assert!(on_write.held() > 0, "nobody wrote too early");
        drop(on_write);
        assert!(writers.end() > 0);
    }
}

#[test]
fn writers_go_on_and_nothing_is_lost_when_it_ends_early() {
    let mut random = sterna_testing::random("writers_go_on_and_nothing_is_lost_when_it_ends_early");
    for ends in 0..4 {
        let (ram, arena) = (ram(Backing::Memfd), arena(2 * PAGES));
        for page in 0..PAGES {
            ram.block(0).write_u64(bytes(page), page + 1).unwrap();
        }
        let Some(on_write) = begun(&ram) else { return };
        let pages = DirtyBitmaps::new(&ram);
        pages.set_all();
        let (pieces, deferred) = defer(&on_write, &ram, &arena, &pages);
        let writers = Writers::begin(&ram, random.u64(..));
        match ends {
            0 => drop(on_write),
            1 => on_write.settle(),
            // The same as when the thread that serves writers has died.
            2 => {
                on_write.shared.abandon(MigrationError::Internal("told to".to_owned()));
                assert!(on_write.broken().is_some());
            }
            // The thread has died without a report.
            _ => {
                on_write.shared.protection.stop_serving();
                on_write.settle();
            }
        }
        assert!(deferred.is_finished());
        for piece in pieces.iter() {
            deferred.ensure(piece.run).unwrap();
        }
        // Blocked writers write the page's first word rarely. The staged content must be the first one.
        for page in 0..PAGES {
            assert_eq!(arena.read_u64(bytes(page)).unwrap(), page + 1);
        }
        assert!(writers.end() > 0);
    }
}

#[test]
fn memory_that_is_given_back_meanwhile_is_staged_as_it_was() {
    let (ram, arena) = (ram(Backing::Memfd), arena(2 * PAGES));
    let Some(on_write) = begun(&ram) else { return };
    for page in 0..PAGES {
        ram.block(0).write_u64(bytes(page), page + 1).unwrap();
    }
    let pages = DirtyBitmaps::new(&ram);
    pages.block(0).set_range(0, PAGES);
    let (_, deferred) = defer(&on_write, &ram, &arena, &pages);

    // Zeroing happens when a guest reports free pages, or when its balloon grows.
    ram.block(0).zero_pages(0, PAGES).unwrap();
    deferred.finish_all().unwrap();

    assert!((0..PAGES).all(|page| ram.block(0).read_u64(bytes(page)).unwrap() == 0));
    assert!((0..PAGES).all(|page| arena.read_u64(bytes(page)).unwrap() == page + 1));
    assert!(ram.block(0).pinned_in(0, PAGES).is_none(), "it may be given back again");
}

#[test]
fn protection_that_fails_is_a_copy_and_what_is_lost_is_an_error() {
    let (ram, arena) = (ram(Backing::Memfd), arena(2 * PAGES));
    let Some(on_write) = begun(&ram) else { return };
    ram.block(1).write_u64(0, 7).unwrap();
    let pages = DirtyBitmaps::new(&ram);
    pages.block(1).set_range(0, 100);
    let (pieces, deferred) = defer(&on_write, &ram, &arena, &pages);
    // The kernel refuses to unblock a writer. The guest continues.
    deferred.lose(&sterna_ram::write_protection::WriteProtectionError::Lifted);
    ram.block(1).write_u64(0, 8).unwrap();
    let error = deferred.ensure(pieces[0].run).expect_err("the page is another now");
    assert!(error.to_string().contains("lifted"), "{error}");

    // The page is not protected any more, and is copied immediately.
    ram.block(1).write_u64(0, 9).unwrap();
    let (pieces, deferred) = defer(&on_write, &ram, &arena, &pages);
    assert!(deferred.is_finished());
    deferred.ensure(pieces[0].run).unwrap();
    ram.block(1).write_u64(0, 10).unwrap();
    assert_eq!(arena.read_u64(0).unwrap(), 9);
    assert!(on_write.broken().is_some());
}
