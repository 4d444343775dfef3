//! Guest RAM of this process, served by its own pager.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_pager::{FillRate, GuestError, OwnEvents, OwnGuest, PageSource, Pager, PagerError, PagerOptions};
use sterna_ram::missing_pages::{MissingPages, MissingPagesError};
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

use crate::common::{MIB, SlowSource, World, until};

/// Counts what the pager tells.
#[derive(Default)]
pub(crate) struct Events {
    pub(crate) completed: AtomicUsize,
    pub(crate) reasons: Mutex<Vec<String>>,
}

impl OwnEvents for Events {
    fn completed(&self) {
        self.completed.fetch_add(1, Ordering::SeqCst);
    }

    fn given_up(&self, why: &GuestError) {
        self.reasons.lock().push(why.to_string());
    }
}

/// Reports that a test was skipped, with the reason. It writes around the capture of a test's output.
pub(crate) fn skipped(test: &str, why: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

pub(crate) fn ram(backing: Backing, lengths: &[u64]) -> GuestRam {
    let block = |(index, bytes): (usize, &u64)| RamBlock::new(format!("m{index}"), *bytes, backing).unwrap();
    GuestRam::new(lengths.iter().enumerate().map(block).collect()).unwrap()
}

/// A pager of RAM whose second block is the first in the image. `None` if this host refuses userfaultfd.
pub(crate) fn serve(
    test: &str,
    source: Arc<dyn PageSource>,
    ram: &GuestRam,
    fill: FillRate,
) -> Option<(Pager, Arc<Events>)> {
    if let Err(why) = MissingPages::probe() {
        skipped(test, why);
        return None;
    }
    let events = Arc::<Events>::default();
    let offsets = vec![ram.block(1).len_bytes(), 0];
    let guest = OwnGuest { name: "own".to_owned(), ram: ram.clone(), offsets, events: events.clone() };
    let options = PagerOptions { fill, ..PagerOptions::default() };
    Some((Pager::serve_own(source, guest, options).unwrap(), events))
}

/// The content of the RAM, in the order of the image.
pub(crate) fn content(ram: &GuestRam) -> Vec<u8> {
    let mut all = Vec::new();
    for index in [1, 0] {
        let block = ram.block(index);
        let start = all.len();
        all.resize(start + block.len_bytes() as usize, 1);
        block.read(0, &mut all[start..]).unwrap();
    }
    all
}

/// Pages of the RAM that count as absent, in the order of the image.
fn absent(ram: &GuestRam) -> Vec<bool> {
    let of = |index: usize| {
        let block = ram.block(index);
        let absent = PageBitmap::new(block.pages());
        block.mark_absent(0, block.pages(), &absent).unwrap();
        (0..block.pages()).map(|page| absent.get(page)).collect::<Vec<_>>()
    };
    [of(1), of(0)].concat()
}

fn zero_pages(memory: &[u8]) -> Vec<bool> {
    memory.chunks(PAGE_SIZE).map(|page| page.iter().all(|byte| *byte == 0)).collect()
}

#[test]
fn own_memory_is_filled_and_zeros_are_left_out() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let world = World::new(4 * MIB);
        let ram = ram(backing, &[MIB, 3 * MIB]);
        let name = "own_memory_is_filled_and_zeros_are_left_out";
        let Some((pager, events)) = serve(name, world.source(), &ram, FillRate::Max) else { return };

        until(&pager, "the release", |guests| guests[0].is_over());
        while ram.is_filling() {
            std::thread::yield_now();
        }

        assert_eq!(absent(&ram), zero_pages(&world.memory), "{backing:?}");
        let zeros = zero_pages(&world.memory).iter().filter(|is_zero| **is_zero).count() as u64;
        assert!(zeros > 0);
        let resident: u64 = ram.blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
        assert_eq!(resident, 4 * MIB - zeros * PAGE_SIZE as u64, "{backing:?}");
        assert!(content(&ram) == world.memory, "{backing:?}");
        drop(pager);
        assert_eq!((events.completed.load(Ordering::SeqCst), events.reasons.lock().len()), (1, 0));
    }
}

#[test]
fn missing_page_is_never_absent_and_every_read_gets_its_content() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let world = World::new(4 * MIB);
        let ram = ram(backing, &[MIB, 3 * MIB]);
        let name = "missing_page_is_never_absent_and_every_read_gets_its_content";
        let Some((pager, _)) = serve(name, world.source(), &ram, FillRate::Off) else { return };

        assert!(ram.is_filling() && !absent(&ram).contains(&true), "{backing:?}");
        assert!(ram.block(0).sharable().is_err(), "another process would find the memory empty");
        assert!(content(&ram) == world.memory, "{backing:?}");
        // Every page was touched.
        until(&pager, "the release", |guests| guests[0].is_over());
    }
}

#[test]
fn huge_pages_of_own_memory_are_placed_whole() {
    let name = "huge_pages_of_own_memory_are_placed_whole";
    let huge = |index: usize, bytes: u64| RamBlock::new(format!("m{index}"), bytes, Backing::Huge2M);
    let blocks = [huge(0, 2 * MIB), huge(1, 6 * MIB)].into_iter().collect::<Result<Vec<_>, _>>();
    // Without a reserved page, mapping or populating fails.
    let blocks = blocks.and_then(|blocks| blocks[1].populate(0, 512).map(|()| blocks));
    let ram = match blocks {
        Ok(blocks) => GuestRam::new(blocks).unwrap(),
        Err(why) => return skipped(name, format!("huge pages: {why}")),
    };
    ram.blocks().iter().for_each(|block| block.discard_all().unwrap());
    let world = World::new(8 * MIB);
    for fill in [FillRate::Off, FillRate::Max] {
        ram.blocks().iter().for_each(|block| block.discard_all().unwrap());
        let Some((pager, _)) = serve(name, world.source(), &ram, fill) else { return };
        if fill == FillRate::Off {
            assert!(!absent(&ram).contains(&true));
        }
        assert!(content(&ram) == world.memory);
        until(&pager, "the release", |guests| guests[0].is_over());
        assert_eq!(pager.guests()[0].page_bytes, 2 * MIB);
    }
}

#[test]
fn page_that_is_absent_while_memory_is_filled_is_zero() {
    let world = World::new(8 * MIB);
    let ram = ram(Backing::Memfd, &[MIB, 7 * MIB]);
    let source = SlowSource::new(&world, 64 << 10, Duration::from_micros(300));
    let name = "page_that_is_absent_while_memory_is_filled_is_zero";
    let Some((pager, _)) = serve(name, source, &ram, FillRate::Max) else { return };

    let zero = zero_pages(&world.memory);
    let mut looks = 0;
    while ram.is_filling() {
        for (page, is_absent) in absent(&ram).into_iter().enumerate() {
            assert!(!is_absent || zero[page], "page {page} has content and counts as absent");
        }
        looks += 1;
    }
    assert!(looks > 1, "the fill ended before the first look");
    assert!(content(&ram) == world.memory);
    drop(pager);
}

#[test]
fn memory_that_is_given_back_reads_as_zeros() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let world = World::new(4 * MIB);
        let ram = ram(backing, &[MIB, 3 * MIB]);
        let source = SlowSource::new(&world, 64 << 10, Duration::from_micros(300));
        let name = "memory_that_is_given_back_reads_as_zeros";
        let Some((pager, _)) = serve(name, source, &ram, FillRate::Max) else { return };

        // One page is in memory when it is given back, and the others are not, or arrive meanwhile.
        let mut page = [0; PAGE_SIZE];
        ram.block(1).read(64 * PAGE_SIZE as u64, &mut page).unwrap();
        ram.block(1).discard_pages(64, 256).unwrap();

        let mut expected = world.memory.clone();
        expected[64 * PAGE_SIZE..320 * PAGE_SIZE].fill(0);
        assert!(content(&ram) == expected, "{backing:?}");
        let guests = until(&pager, "the release", |guests| guests[0].is_over());
        assert_eq!(guests[0].removed_pages, 256);
        assert!(content(&ram) == expected, "{backing:?}");
    }
}

#[test]
fn page_that_cannot_be_read_stops_the_guest_once_and_is_not_fed() {
    let world = World::new(4 * MIB);
    let ram = ram(Backing::Memfd, &[MIB, 3 * MIB]);
    let source = SlowSource::new(&world, 64 << 10, Duration::ZERO);
    source.is_broken.store(true, Ordering::Relaxed);
    let name = "page_that_cannot_be_read_stops_the_guest_once_and_is_not_fed";
    let Some((pager, events)) = serve(name, source, &ram, FillRate::Off) else { return };

    let touched = Arc::new(AtomicUsize::new(0));
    for page in [5, 6, 200] {
        let (ram, touched) = (ram.clone(), touched.clone());
        // The thread waits until the memory is unmapped or the process ends.
        std::thread::spawn(move || {
            let mut content = [0; PAGE_SIZE];
            ram.block(1).read(page * PAGE_SIZE as u64, &mut content).unwrap();
            touched.fetch_add(1, Ordering::SeqCst);
        });
    }
    let guests = until(&pager, "the end", |guests| guests[0].is_over());
    std::thread::sleep(Duration::from_millis(50));

    let reasons = events.reasons.lock().clone();
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert!(reasons[0].contains("page at byte") && reasons[0].contains("slow ends before"), "{reasons:?}");
    assert_eq!(touched.load(Ordering::SeqCst), 0);
    assert!(ram.is_filling() && guests[0].missing_pages > 0);
    // The threads still wait, so the registration must stay.
    std::mem::forget(pager);
}

#[test]
fn pages_of_1_gib_are_refused_with_the_rule() {
    let name = "pages_of_1_gib_are_refused_with_the_rule";
    let block = match RamBlock::new("m0", 1 << 30, Backing::Huge1G) {
        Ok(block) => block,
        Err(why) => return skipped(name, format!("huge pages: {why}")),
    };
    let ram = GuestRam::new(vec![block]).unwrap();
    let world = World::new(1 << 30);
    let guest = OwnGuest {
        name: "own".to_owned(),
        ram: ram.clone(),
        offsets: vec![0],
        events: Arc::<Events>::default(),
    };

    let refused = Pager::serve_own(world.source(), guest, PagerOptions::default()).map(drop).unwrap_err();

    let PagerError::Memory(MissingPagesError::Refused { block, rule }) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(block, "m0");
    assert!(rule.contains("1 GiB") && rule.contains("2 MiB"), "{rule}");
    assert!(!ram.is_filling());
}

#[test]
fn other_memory_than_the_images_is_refused() {
    let world = World::new(4 * MIB);
    let refused = |lengths: &[u64], offsets: Vec<u64>| {
        let ram = ram(Backing::Memfd, lengths);
        let guest =
            OwnGuest { name: "own".to_owned(), ram: ram.clone(), offsets, events: Arc::<Events>::default() };
        let result = Pager::serve_own(world.source(), guest, PagerOptions::default());
        assert!(!ram.is_filling());
        matches!(result, Err(PagerError::OtherMemory { .. }))
    };

    assert!(refused(&[MIB, 2 * MIB], vec![0, MIB]), "too short");
    assert!(refused(&[MIB, 3 * MIB], vec![0, 2 * MIB]), "a gap");
    assert!(refused(&[MIB, 3 * MIB], vec![0, 0]), "twice the same");
    assert!(refused(&[MIB, 3 * MIB], vec![0]), "a block without a place");
}
