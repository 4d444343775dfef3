//! Tests of the vhost log: against a model, and filled by another process.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use sterna_ram::RamBlock;
use sterna_ram::dirty::{Combined, LoggedRange, SoftwareLog, VhostLog};
use sterna_ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, SyncReport,
};

const PAGE: u64 = PAGE_SIZE as u64;

/// Shared memory as a back end has it: a separate mapping.
struct Mapped {
    address: *mut u8,
    len: usize,
}

impl Mapped {
    fn new(file: BorrowedFd<'_>, len: u64) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let len = len as usize;
        let address =
            // SAFETY: the kernel chooses a free address.
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(address, libc::MAP_FAILED);
        Mapped { address: address.cast(), len }
    }

    /// Logs a page like a back end: sets one bit of one byte.
    fn log(&self, guest_page: u64) {
        assert!(guest_page / 8 < self.len as u64);
        // SAFETY: inside the mapping, which is never unmapped.
        let byte = unsafe { AtomicU8::from_ptr(self.address.add((guest_page / 8) as usize)) };
        byte.fetch_or(1 << (guest_page % 8), Ordering::SeqCst);
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len as u64);
        // SAFETY: inside the mapping, which is never unmapped, and aligned.
        unsafe { AtomicU64::from_ptr(self.address.add(offset as usize).cast()) }
    }
}

fn mapped(log: &VhostLog) -> Mapped {
    Mapped::new(log.file(), log.len_bytes())
}

/// Makes blocks without memory, because only their sizes matter.
fn shape(pages: &[u64]) -> GuestRam {
    let block = |(index, pages): (usize, &u64)| {
        RamBlock::without_memory(format!("ram{index}"), pages * PAGE).unwrap()
    };
    GuestRam::new(pages.iter().enumerate().map(block).collect()).unwrap()
}

fn range(guest_page: u64, block: usize, first_page: u64, pages: u64) -> LoggedRange {
    LoggedRange { guest_address: guest_page * PAGE, block, first_page, pages }
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

/// Returns ranges of random lengths at random places, with and without holes between them.
fn random_ranges(random: &mut fastrand::Rng, pages: &[u64]) -> Vec<LoggedRange> {
    let mut guest_page = random.u64(..200);
    let mut ranges = Vec::new();
    for (block, &pages) in pages.iter().enumerate() {
        let mut first = random.u64(..70);
        while first < pages {
            let count = (1 + random.u64(..pages)).min(pages - first);
            ranges.push(range(guest_page, block, first, count));
            guest_page += count + random.u64(..3) * random.u64(..100);
            first += count + random.u64(..2) * random.u64(..70);
        }
    }
    ranges
}

#[test]
fn vhost_log_over_crooked_ranges_is_synced_as_the_model() {
    let mut random = sterna_testing::random("vhost_log_over_crooked_ranges");
    for _ in 0..300 {
        let pages: Vec<u64> = (0..3).map(|_| 71 + random.u64(..2000)).collect();
        let ram = shape(&pages);
        let ranges = random_ranges(&mut random, &pages);
        let log = VhostLog::new(&ram, ranges.clone()).unwrap();
        log.start().unwrap();
        let back_end = mapped(&log);
        let end = ranges.iter().map(|range| range.guest_address / PAGE + range.pages).max().unwrap();
        let step = 1 + random.u64(..30);
        // Also logs pages in holes, which belong to no block.
        let logged: Vec<u64> = (0..end).filter(|_| random.u64(..step) == 0).collect();
        logged.iter().for_each(|page| back_end.log(*page));
        let expected = DirtyBitmaps::new(&ram);
        for range in &ranges {
            let first = range.guest_address / PAGE;
            for page in logged.iter().filter(|page| (first..first + range.pages).contains(page)) {
                expected.block(range.block).set(range.first_page + page - first);
            }
        }

        let found = sync(&log, &ram);

        for block in 0..3 {
            assert_eq!(set(found.block(block)), set(expected.block(block)), "{ranges:?}");
        }
        assert_eq!(sync(&log, &ram).count(), 0, "syncing clears");
        back_end.log(ranges[0].guest_address / PAGE);
        assert_eq!(set(sync(&log, &ram).block(ranges[0].block)), [ranges[0].first_page]);
    }
}

/// Large enough for threads, with every combination of offsets in words.
#[test]
fn vhost_log_of_a_large_guest_is_synced_as_the_model() {
    let mut random = sterna_testing::random("vhost_log_of_a_large_guest");
    for (guest_page, first_page) in [(0, 0), (64, 13), (13, 64), (77, 12), (12, 0), (5, 4)] {
        let pages = (1 << 27) + 333;
        let ram = shape(&[pages]);
        let log = VhostLog::new(&ram, vec![range(guest_page, 0, first_page, pages - 100)]).unwrap();
        log.start().unwrap();
        let back_end = mapped(&log);
        let mut expected = std::collections::BTreeSet::new();
        // Random pages, and pages at the borders of all possible parts.
        let anywhere = (0..3000).map(|_| random.u64(..pages - 100)).collect::<Vec<_>>();
        let borders = (0..=256).flat_map(|part| {
            let border = part * (pages / 256);
            (border..border + 70).filter(|page| *page < pages - 100)
        });
        for page in anywhere.into_iter().chain(borders).chain([0, pages - 101]) {
            back_end.log(guest_page + page);
            expected.insert(first_page + page);
        }

        let mut found = DirtyBitmaps::new(&ram);
        let first = log.sync(&mut found).unwrap();

        assert_eq!(first.newly_dirty, expected.len() as u64);
        assert!(expected.iter().all(|page| found.block(0).get(*page)));
        assert_eq!(found.count(), first.newly_dirty);
        assert_eq!(log.sync(&mut found).unwrap().newly_dirty, 0);
        let times = first.times;
        assert!(times.vhost > std::time::Duration::ZERO && times.kernel == std::time::Duration::ZERO);
        let crooked = guest_page % 64 != first_page % 64;
        assert_eq!(times.misaligned > times.aligned, crooked, "{times:?}");
    }
}

#[test]
fn vhost_log_counts_only_what_is_new() {
    let ram = shape(&[1000]);
    let log = VhostLog::new(&ram, vec![range(100, 0, 7, 900)]).unwrap();
    log.start().unwrap();
    let mut found = DirtyBitmaps::new(&ram);
    found.block(0).set_range(7, 2);
    (100..104).for_each(|page| mapped(&log).log(page));
    assert_eq!(log.sync(&mut found).unwrap().newly_dirty, 2);
    assert_eq!(set(found.block(0)), [7, 8, 9, 10]);
}

#[test]
fn vhost_log_started_and_stopped_forgets_what_was_before() {
    let ram = shape(&[1000]);
    let log = VhostLog::new(&ram, vec![range(0, 0, 0, 1000)]).unwrap();
    let back_end = mapped(&log);
    let mut found = DirtyBitmaps::new(&ram);
    assert!(matches!(log.sync(&mut found), Err(DirtyError::NotStarted { .. })));
    back_end.log(1);
    log.start().unwrap();
    assert!(log.is_active());
    assert_eq!(sync(&log, &ram).count(), 0);
    back_end.log(2);
    log.start().unwrap();
    assert_eq!(set(sync(&log, &ram).block(0)), [2], "starting twice clears once");
    back_end.log(3);
    log.stop().unwrap();
    log.stop().unwrap();
    assert!(!log.is_active());
    assert!(matches!(log.sync(&mut found), Err(DirtyError::NotStarted { .. })));
    log.start().unwrap();
    assert_eq!(sync(&log, &ram).count(), 0);
    let foreign = shape(&[999]);
    assert!(matches!(log.sync(&mut DirtyBitmaps::new(&foreign)), Err(DirtyError::Range { .. })));
    assert!(matches!(log.rearm(0, 1, 64, found.block(0)), Err(DirtyError::Range { .. })));
    log.rearm(0, 0, 64, found.block(0)).unwrap();
}

#[test]
fn vhost_log_too_small_or_over_impossible_ranges_is_refused() {
    let ram = shape(&[1000]);
    let top = range(1 << 20, 0, 0, 1000);
    let needed = ((1u64 << 20) + 1000).div_ceil(8);
    match VhostLog::with_size(&ram, vec![top], needed - 1) {
        Err(DirtyError::LogTooSmall { log_bytes, needed_bytes, .. }) => {
            assert_eq!((log_bytes, needed_bytes), (needed - 1, needed));
        }
        other => panic!("{other:?}"),
    }
    assert!(VhostLog::with_size(&ram, vec![top], needed).unwrap().len_bytes() >= needed);
    assert!(VhostLog::new(&ram, vec![top]).unwrap().len_bytes() >= needed);
    let refused = |ranges: &[LoggedRange], bad: usize| match VhostLog::new(&ram, ranges.to_vec()) {
        Err(DirtyError::GuestRange { index, .. }) => assert_eq!(index, bad, "{ranges:?}"),
        other => panic!("{ranges:?}: {other:?}"),
    };
    refused(&[top, range(0, 1, 0, 1)], 1);
    refused(&[range(0, 0, 0, 0)], 0);
    refused(&[range(0, 0, 1, 1000)], 0);
    refused(&[range(0, 0, u64::MAX, 2)], 0);
    refused(&[LoggedRange { guest_address: 5, ..range(0, 0, 0, 1) }], 0);
    refused(&[range(0, 0, 0, 100), range(99, 0, 500, 5)], 1);
    let last = LoggedRange { guest_address: u64::MAX / PAGE * PAGE, ..range(0, 0, 0, 2) };
    assert!(VhostLog::new(&ram, vec![last]).is_err(), "no memory for such a log");
}

/// Combines the reports of vCPUs (here a software log) and of devices of one guest.
#[test]
fn combined_reports_what_either_source_saw() {
    let ram = shape(&[500]);
    let cpu = Arc::new(SoftwareLog::new(&ram));
    let devices = Arc::new(VhostLog::new(&ram, vec![range(3, 0, 0, 500)]).unwrap());
    let both = Combined::new(vec![cpu.clone(), devices.clone()]);
    assert!(matches!(both.sync(&mut DirtyBitmaps::new(&ram)), Err(DirtyError::NotStarted { .. })));
    both.start().unwrap();
    both.start().unwrap();
    cpu.mark_range(0, 5, 2);
    mapped(&devices).log(3 + 6);
    mapped(&devices).log(3 + 7);

    let mut found = DirtyBitmaps::new(&ram);
    assert_eq!(both.sync(&mut found).unwrap().newly_dirty, 3, "a page that both saw counts once");

    assert_eq!(set(found.block(0)), [5, 6, 7]);
    assert_eq!(set(sync(&both, &ram).block(0)), [5, 6], "the CPUs' are reported until re-armed");
    both.rearm(0, 0, 500, found.block(0)).unwrap();
    assert_eq!(sync(&both, &ram).count(), 0);
    assert!(!both.initially_set());
    both.stop().unwrap();
    assert!(!devices.is_active());
    assert!(matches!(cpu.sync(&mut found), Err(DirtyError::NotStarted { .. })));
}

/// A source whose start or stop may fail, and which may be initially set.
#[derive(Default)]
struct Fickle {
    fails_to_start: bool,
    fails_to_stop: bool,
    initially_set: bool,
    starts: AtomicU64,
    stops: AtomicU64,
}

impl DirtySource for Fickle {
    fn start(&self) -> Result<(), DirtyError> {
        self.starts.fetch_add(1, Ordering::Relaxed);
        if self.fails_to_start { Err(DirtyError::NotStarted { origin: "start" }) } else { Ok(()) }
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.stops.fetch_add(1, Ordering::Relaxed);
        if self.fails_to_stop { Err(DirtyError::NotStarted { origin: "stop" }) } else { Ok(()) }
    }
    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }
    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }
    fn initially_set(&self) -> bool {
        self.initially_set
    }
    fn name(&self) -> &'static str {
        "fickle"
    }
}

#[test]
fn combined_starts_all_or_none() {
    let ram = shape(&[64]);
    let (first, second) = (Arc::new(SoftwareLog::new(&ram)), Arc::new(Fickle::default()));
    let third = Arc::new(Fickle { fails_to_start: true, ..Fickle::default() });
    let last = Arc::new(Fickle::default());
    let all = Combined::new(vec![first.clone(), second.clone(), third, last.clone()]);

    assert!(matches!(all.start(), Err(DirtyError::NotStarted { origin: "start" })));

    let mut bits = DirtyBitmaps::new(&ram);
    assert!(matches!(first.sync(&mut bits), Err(DirtyError::NotStarted { origin: "software-log" })));
    assert_eq!(second.stops.load(Ordering::Relaxed), 1);
    assert_eq!(last.starts.load(Ordering::Relaxed) + last.stops.load(Ordering::Relaxed), 0);
    assert!(matches!(all.sync(&mut bits), Err(DirtyError::NotStarted { origin: "combined" })));
}

#[test]
fn combined_stops_all_even_after_an_error() {
    let ram = shape(&[64]);
    let first = Arc::new(Fickle { fails_to_stop: true, ..Fickle::default() });
    let second = Arc::new(SoftwareLog::new(&ram));
    let all = Combined::new(vec![first, second.clone()]);
    all.start().unwrap();

    assert!(matches!(all.stop(), Err(DirtyError::NotStarted { origin: "stop" })));

    let mut bits = DirtyBitmaps::new(&ram);
    assert!(matches!(second.sync(&mut bits), Err(DirtyError::NotStarted { .. })));
}

#[test]
fn combined_is_initially_set_if_one_of_its_sources_is() {
    let source =
        |initially_set| -> Arc<dyn DirtySource> { Arc::new(Fickle { initially_set, ..Fickle::default() }) };
    assert!(Combined::new(vec![source(false), source(true)]).initially_set());
    assert!(!Combined::new(vec![source(false), source(false)]).initially_set());
}

/// Number of pages of the shared guest, their guest page, and their first page in the block.
const SHARED_PAGES: u64 = 300;
const SHARED_GUEST_PAGE: u64 = 1003;
const SHARED_FIRST: u64 = 13;
const LOG_VARIABLE: &str = "STERNA_TEST_VHOST_LOG";
const RAM_VARIABLE: &str = "STERNA_TEST_VHOST_RAM";

/// A device in another process writes a number into a page and then logs the page, repeatedly.
///
/// If a final value was not read after a sync, a bit was lost.
#[test]
fn vhost_log_filled_by_another_process_loses_no_write() {
    let blocks = vec![RamBlock::new("ram", (SHARED_PAGES + 20) * PAGE, Backing::Memfd).unwrap()];
    let ram = GuestRam::new(blocks).unwrap();
    let ranges = vec![range(SHARED_GUEST_PAGE, 0, SHARED_FIRST, SHARED_PAGES)];
    let log = VhostLog::new(&ram, ranges).unwrap();
    log.start().unwrap();
    let path = |file: BorrowedFd<'_>| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let mut device = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "vhost::vhost_device_of_another_process"])
        .env(LOG_VARIABLE, path(log.file()))
        .env(RAM_VARIABLE, path(ram.block(0).shared_file().unwrap().file.as_fd()))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut copy = vec![0; SHARED_PAGES as usize];
    let mut syncs = 0;
    let mut reported = 0;
    loop {
        let ended = device.try_wait().unwrap();
        let found = sync(&log, &ram);
        for page in set(found.block(0)) {
            let value = ram.block(0).read_u64(page * PAGE).unwrap();
            copy[(page - SHARED_FIRST) as usize] = value;
            reported += 1;
        }
        syncs += 1;
        // Also on a slow machine, the device writes until some syncs have found its writes.
        if reported > 2 * SHARED_PAGES && syncs > 2 {
            drop(device.stdin.take());
        }
        if let Some(status) = ended {
            assert!(status.success(), "{status}");
            break;
        }
    }
    for (page, value) in (SHARED_FIRST..).zip(copy) {
        let last = ram.block(0).read_u64(page * PAGE).unwrap();
        assert!(last > 0, "page {page} was not written");
        assert_eq!(value, last, "page {page}");
    }
}

#[test]
#[ignore = "the other process of vhost_log_filled_by_another_process_loses_no_write"]
fn vhost_device_of_another_process() {
    let open = |variable: &str| -> File {
        let path = std::env::var(variable).expect("started by the other test");
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    };
    let map = |file: File| {
        let len = file.metadata().unwrap().len();
        Mapped::new(std::os::fd::AsFd::as_fd(&file), len)
    };
    let (log, ram) = (map(open(LOG_VARIABLE)), map(open(RAM_VARIABLE)));
    let is_enough = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&is_enough);
    std::thread::spawn(move || {
        let _ = std::io::Read::read_to_end(&mut std::io::stdin(), &mut Vec::new());
        told.store(true, Ordering::Relaxed);
    });
    let mut dice = fastrand::Rng::with_seed(1);
    for value in 1u64.. {
        if value > 1_000_000 && is_enough.load(Ordering::Relaxed) {
            break;
        }
        let page = dice.u64(..SHARED_PAGES);
        ram.word((SHARED_FIRST + page) * PAGE).store(value, Ordering::Relaxed);
        log.log(SHARED_GUEST_PAGE + page);
    }
}
