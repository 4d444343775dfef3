//! Tests of the software log and of userfaultfd.

use crate::support::skipped;
use sterna_ram::dirty::{SoftwareLog, UffdDirtyLog};
use sterna_ram::{Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

const PAGE: u64 = PAGE_SIZE as u64;

fn ram(pages: u64, backings: &[Backing]) -> GuestRam {
    let block = |(index, backing): (usize, &Backing)| {
        let block = RamBlock::new(format!("ram{index}"), pages * PAGE, *backing).unwrap();
        block.advise_huge_pages(false).unwrap();
        block
    };
    GuestRam::new(backings.iter().enumerate().map(block).collect()).unwrap()
}

fn set(bitmap: &PageBitmap) -> Vec<u64> {
    (0..bitmap.pages()).filter(|page| bitmap.get(*page)).collect()
}

fn sync(source: &dyn DirtySource, ram: &GuestRam) -> DirtyBitmaps {
    let mut found = DirtyBitmaps::new(ram);
    let report = source.sync(&mut found).unwrap();
    assert_eq!(report.newly_dirty, found.count());
    found
}

#[test]
fn software_log_bits_stay_until_rearmed() {
    let ram = ram(100, &[Backing::Anonymous, Backing::Anonymous]);
    let log = SoftwareLog::new(&ram);
    log.mark(0, 1);
    log.start().unwrap();
    log.mark(0, 5);
    log.mark_range(1, 98, 2);

    let first = sync(&log, &ram);
    assert_eq!((set(first.block(0)), set(first.block(1))), (vec![5], vec![98, 99]));
    assert_eq!(set(sync(&log, &ram).block(0)), [5], "reported again until re-armed");

    log.mark(0, 6);
    log.rearm(0, 0, 64, first.block(0)).unwrap();
    log.rearm(1, 0, 64, first.block(1)).unwrap();
    let second = sync(&log, &ram);
    assert_eq!(set(second.block(0)), [6], "what was not synced is not cleared");
    assert_eq!(set(second.block(1)), [98, 99], "outside the range nothing is re-armed");
    log.rearm(1, 64, 36, first.block(1)).unwrap();
    assert_eq!(set(sync(&log, &ram).block(1)), [0_u64; 0]);

    log.stop().unwrap();
    log.stop().unwrap();
    assert!(matches!(log.sync(&mut DirtyBitmaps::new(&ram)), Err(DirtyError::NotStarted { .. })));
    log.start().unwrap();
    assert_eq!(sync(&log, &ram).count(), 0);
}

#[test]
fn rearm_crooked_ranges_are_refused() {
    let ram = ram(100, &[Backing::Anonymous]);
    let log = SoftwareLog::new(&ram);
    log.start().unwrap();
    let bits = PageBitmap::new(100);
    let refused = |block, first, count, bits: &PageBitmap| {
        matches!(log.rearm(block, first, count, bits), Err(DirtyError::Range { .. }))
    };
    assert!(refused(1, 0, 64, &bits), "no such block");
    assert!(refused(0, 1, 99, &bits), "not at a word");
    assert!(refused(0, 0, 63, &bits), "not whole words");
    assert!(refused(0, 64, 37, &bits), "behind the end");
    assert!(refused(0, 64, u64::MAX, &bits), "behind the end");
    assert!(refused(0, 0, 64, &PageBitmap::new(64)), "another bitmap");
    assert!(log.rearm(0, 64, 36, &bits).is_ok());
    let mut foreign = DirtyBitmaps::new(&self::ram(99, &[Backing::Anonymous]));
    assert!(matches!(log.sync(&mut foreign), Err(DirtyError::Range { .. })));
}

/// A writer marks pages after it writes them; a migrator syncs, re-arms and then reads.
///
/// At the end, the migrator's copy must equal the RAM.
#[test]
fn software_log_under_a_writer_loses_no_write() {
    let ram = ram(64, &[Backing::Memfd]);
    let log = SoftwareLog::new(&ram);
    log.start().unwrap();
    let block = ram.block(0);
    let mut copy = [0u64; 64];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut dice = fastrand::Rng::with_seed(1);
            for value in 1..300_000u64 {
                let page = dice.u64(..64);
                block.write_u64(page * PAGE, value).unwrap();
                log.mark(0, page);
            }
        });
        loop {
            let last = writer.is_finished();
            let found = sync(&log, &ram);
            log.rearm(0, 0, 64, found.block(0)).unwrap();
            for page in set(found.block(0)) {
                copy[page as usize] = block.read_u64(page * PAGE).unwrap();
            }
            if last {
                break;
            }
        }
    });
    for (page, value) in copy.iter().enumerate() {
        assert_eq!(*value, block.read_u64(page as u64 * PAGE).unwrap(), "page {page}");
    }
}

fn uffd(test: &str, ram: &GuestRam) -> Option<UffdDirtyLog> {
    let log = UffdDirtyLog::new(ram.clone());
    match log.start() {
        Ok(()) => Some(log),
        Err(error @ DirtyError::Unsupported { .. }) => {
            assert!(!UffdDirtyLog::is_supported());
            skipped(test, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn uffd_random_writes_are_synced_exactly() {
    let mut random = sterna_testing::random("uffd_random_writes");
    const PAGES: u64 = 8192;
    let ram = ram(PAGES, &[Backing::Memfd, Backing::Anonymous]);
    for page in 0..PAGES / 2 {
        for block in ram.blocks() {
            block.write(page * 2 % PAGES * PAGE, &[1]).unwrap();
        }
    }
    let Some(log) = uffd("uffd_random_writes_are_synced_exactly", &ram) else { return };
    assert_eq!(sync(&log, &ram).count(), 0, "writes before the start are not reported");
    for round in 0..30 {
        let mut expected = [Vec::new(), Vec::new()];
        for (index, block) in ram.blocks().iter().enumerate() {
            // From a few pages to thousands of regions, more than one scan returns.
            for _ in 0..random.u64(..1 << (1 + round % 13)) {
                let page = random.u64(..PAGES);
                block.write(page * PAGE + random.u64(..PAGE), &[round as u8]).unwrap();
                expected[index].push(page);
            }
            expected[index].sort_unstable();
            expected[index].dedup();
        }
        let found = sync(&log, &ram);
        assert_eq!(set(found.block(0)), expected[0], "memfd, round {round}");
        assert_eq!(set(found.block(1)), expected[1], "anonymous, round {round}");
    }
    // Every second page: the largest possible number of regions.
    for page in (0..PAGES).step_by(2) {
        ram.block(0).write(page * PAGE, &[2]).unwrap();
        ram.block(1).write(page * PAGE, &[2]).unwrap();
    }
    assert_eq!(sync(&log, &ram).count(), PAGES);
    assert_eq!(sync(&log, &ram).count(), 0);
}

#[test]
fn uffd_reading_is_no_writing() {
    let ram = ram(64, &[Backing::Memfd, Backing::Anonymous]);
    for block in ram.blocks() {
        block.write(3 * PAGE, &[1]).unwrap();
    }
    let Some(log) = uffd("uffd_reading_is_no_writing", &ram) else { return };
    for block in ram.blocks() {
        block.read(3 * PAGE, &mut [0; 100]).unwrap();
    }
    // Reading populates a hole of the memfd but does not write it.
    ram.block(0).read(9 * PAGE, &mut [0; 100]).unwrap();
    assert_eq!(sync(&log, &ram).count(), 0);
}

#[test]
fn uffd_kernel_writes_are_reported() {
    use std::io::{Read, Write};
    let ram = ram(64, &[Backing::Memfd, Backing::Anonymous]);
    ram.block(0).write(5 * PAGE, &[1]).unwrap();
    let Some(log) = uffd("uffd_kernel_writes_are_reported", &ram) else { return };
    let (mut reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
    writer.write_all(&[7; 2 * PAGE_SIZE]).unwrap();
    for (index, page) in [(0usize, 5u64), (1, 9)] {
        let target = ram.block(index).page(page).unwrap();
        // SAFETY: no other code accesses this page during the call, and the slice ends with it.
        let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), PAGE_SIZE) };
        reader.read_exact(target).unwrap();
    }
    let found = sync(&log, &ram);
    assert_eq!((set(found.block(0)), set(found.block(1))), (vec![5], vec![9]));
}

#[test]
fn uffd_started_leaves_absent_pages_absent() {
    let ram = ram(4096, &[Backing::Memfd, Backing::Anonymous]);
    for block in ram.blocks() {
        block.write(7 * PAGE, &[1]).unwrap();
    }
    let Some(log) = uffd("uffd_started_leaves_absent_pages_absent", &ram) else { return };
    sync(&log, &ram);
    for block in ram.blocks() {
        let absent = PageBitmap::new(4096);
        block.mark_absent(0, 4096, &absent).unwrap();
        assert_eq!(absent.count(), 4095, "{:?}", block.is_shared());
        assert!(!absent.get(7));
        assert_eq!(block.resident_bytes().unwrap(), PAGE);
    }
}

#[test]
fn uffd_stopped_can_start_again_and_another_can_too() {
    let ram = ram(64, &[Backing::Memfd, Backing::Anonymous]);
    let Some(log) = uffd("uffd_stopped_can_start_again_and_another_can_too", &ram) else { return };
    let other = UffdDirtyLog::new(ram.clone());
    assert!(matches!(other.start(), Err(DirtyError::System { .. })), "one at a time");
    log.stop().unwrap();
    log.stop().unwrap();
    other.start().unwrap();
    ram.block(1).write(0, &[1]).unwrap();
    assert_eq!(sync(&other, &ram).count(), 1);
    drop(other);
    log.start().unwrap();
    assert_eq!(sync(&log, &ram).count(), 0);
}

/// The same test as with the software log, but the kernel tracks writers that do not report their writes.
#[test]
fn uffd_under_writers_loses_no_write() {
    let ram = ram(256, &[Backing::Memfd, Backing::Anonymous]);
    let Some(log) = uffd("uffd_under_writers_loses_no_write", &ram) else { return };
    let mut copy = vec![[0u64; 256]; 2];
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|index| {
                let block = ram.block(index);
                scope.spawn(move || {
                    let mut dice = fastrand::Rng::with_seed(1);
                    for value in 1..200_000u64 {
                        block.write_u64(dice.u64(..256) * PAGE, value).unwrap();
                    }
                })
            })
            .collect();
        loop {
            let last = writers.iter().all(|writer| writer.is_finished());
            let found = sync(&log, &ram);
            for (index, copy) in copy.iter_mut().enumerate() {
                for page in set(found.block(index)) {
                    copy[page as usize] = ram.block(index).read_u64(page * PAGE).unwrap();
                }
            }
            if last {
                break;
            }
        }
    });
    for (index, copy) in copy.iter().enumerate() {
        for (page, value) in copy.iter().enumerate() {
            assert_eq!(*value, ram.block(index).read_u64(page as u64 * PAGE).unwrap(), "{index}: {page}");
        }
    }
}

#[test]
fn uffd_rearmed_pages_are_not_reported_and_others_are_kept() {
    const PAGES: u64 = 256;
    let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let Some(log) = uffd("uffd_rearmed_pages_are_not_reported_and_others_are_kept", &ram) else { return };
    log.start().unwrap();
    let write = |page: u64| ram.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap();
    let synced = || {
        let mut found = DirtyBitmaps::new(&ram);
        let newly = log.sync(&mut found).unwrap().newly_dirty;
        assert_eq!(newly, found.count());
        (0..PAGES).filter(|page| found.block(0).get(*page)).collect::<Vec<_>>()
    };
    let about_to_be_read = PageBitmap::new(PAGES);
    about_to_be_read.set_range(60, 10);
    [5, 63, 64, 69, 70, 127, 200].into_iter().for_each(write);

    log.rearm(0, 0, 128, &about_to_be_read).unwrap();

    assert_eq!(synced(), [5, 70, 127, 200], "63, 64 and 69 will be read as they are now");
    assert_eq!(synced(), [0; 0]);
    [63, 70].into_iter().for_each(write);
    assert_eq!(synced(), [63, 70], "they are protected again");
    log.rearm(0, 0, PAGES, &about_to_be_read).unwrap();
    log.stop().unwrap();
}
