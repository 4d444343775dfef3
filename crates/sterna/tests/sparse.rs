//! Pages that are zero or absent: a sparse guest stays sparse on both sides, and the destination clears the pages
//! that must be zero.
#![allow(clippy::print_stdout, reason = "says how much memory was resident")]

mod common;
mod plain;

use std::sync::{Arc, Mutex, PoisonError};

use common::*;
use plain::{Plain, byte_of};
use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm, Vm,
    ZeroPageDetection,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_guests::{Fill, Pattern};

const GIB: u64 = 1 << 30;

/// Locked by tests that measure the memory of the whole process, so that they run one after the other.
static MEMORY: Mutex<()> = Mutex::new(());

fn resident_of_process() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn resident(guest: &ProcessGuest) -> u64 {
    guest.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum()
}

/// Migrates a guest of `bytes` that uses 100 MiB of its memory.
fn sparse_guest_stays_sparse(bytes: u64, backing: Backing, tracking: Tracking, lanes: u8) {
    let _alone = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let before = resident_of_process();
    let config = ProcessConfig {
        blocks: vec![("ram.low".into(), 3 * GIB), ("ram.high".into(), bytes - 3 * GIB)],
        backing,
        tracking,
        pattern: Pattern::Random,
        fill: Fill::Zero,
        working_set_pages: Some(12_800),
        rate: 50_000,
        ..ProcessConfig::default()
    };
    let (source, target) = pair(&config);
    assert!(source.wait_progress(2_000, std::time::Duration::from_secs(20)));
    source.set_pattern(Pattern::Idle, None).unwrap();
    let (mut params, mut capabilities) = multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    params.max_bandwidth_bytes = 0;
    let (migration, outcome, arrival) = migrate(&source, &target, &params, capabilities);
    let (there, here) = (resident(&source), resident(&target));
    let at_most = resident_of_process() - before.min(resident_of_process());
    assert_arrived(&outcome, &arrival, &target);
    let stats = migration.statistics();
    println!(
        "{backing:?} {} GiB over {lanes} lanes: resident {} MiB there, {} MiB here, process {} MiB, took {:?}",
        bytes / GIB,
        there >> 20,
        here >> 20,
        at_most >> 20,
        stats.total_time
    );
    assert!(there < GIB && here < GIB, "{there} bytes resident at the source, {here} at the destination");
    assert!(at_most < GIB, "the process holds {at_most} bytes");
    assert!(stats.absent_pages * (PAGE_SIZE as u64) > bytes - GIB, "{} absent pages", stats.absent_pages);
    drop((migration, source, target));
    // The last threads end shortly after the migration.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while resident_of_process() >= before + (64 << 20) && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let after = resident_of_process();
    assert!(after < before + (64 << 20), "{before} bytes before, {after} after");
}

#[test]
fn sparse_guest_of_64_gib_stays_sparse_over_multifd() {
    sparse_guest_stays_sparse(64 * GIB, Backing::Memfd, Tracking::Software, 2);
}

#[test]
fn sparse_guest_of_64_gib_stays_sparse_over_the_main_channel() {
    sparse_guest_stays_sparse(64 * GIB, Backing::Memfd, Tracking::Software, 0);
}

#[test]
fn sparse_guest_in_anonymous_memory_stays_sparse() {
    for tracking in Tracking::available() {
        sparse_guest_stays_sparse(16 * GIB, Backing::Anonymous, tracking, 2);
    }
}

#[test]
fn sparse_guest_whose_writes_userfaultfd_finds_stays_sparse() {
    if !Tracking::available().contains(&Tracking::Userfaultfd) {
        #[allow(clippy::print_stderr, reason = "says that it was skipped")]
        {
            eprintln!(
                "SKIPPED sparse_guest_whose_writes_userfaultfd_finds_stays_sparse: no asynchronous userfaultfd"
            );
        }
        return;
    }
    sparse_guest_stays_sparse(16 * GIB, Backing::Memfd, Tracking::Userfaultfd, 2);
}

fn ram(pages: u64) -> GuestRam {
    GuestRam::new(vec![RamBlock::new("ram", pages * PAGE_SIZE as u64, Backing::Memfd).unwrap()]).unwrap()
}

fn move_plain(
    source: &Arc<Plain>,
    target: &Arc<Plain>,
    params: &Parameters,
    capabilities: Capabilities,
) -> u64 {
    let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming = Incoming::listen(vm, &any, params.clone(), capabilities, Arc::new(())).unwrap();
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    let to = incoming.address();
    let migration = Migration::start(vm, &to, params.clone(), capabilities, Arc::new(())).unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
    incoming.statistics().cleared_pages
}

/// All combinations of settings in which zero pages are sent differently.
fn ways() -> Vec<(Parameters, Capabilities)> {
    let mut ways = Vec::new();
    for detection in [ZeroPageDetection::Multifd, ZeroPageDetection::Legacy, ZeroPageDetection::None] {
        for on in [true, false] {
            let (mut params, mut capabilities) = multifd(2);
            params.zero_page_detection = detection;
            capabilities.multifd = on;
            ways.push((params, capabilities));
        }
    }
    ways
}

#[test]
fn zero_page_clears_memory_that_may_hold_bytes() {
    for (params, capabilities) in ways() {
        // Arrange: every page of the destination has content, and every third page of the source.
        let (source, target) = (Plain::new(ram(1500)), Plain::with(ram(1500), true));
        (0..1500).for_each(|page| target.write(page, 0xee));
        (0..1500).step_by(3).for_each(|page| source.write(page, 7));

        let cleared = move_plain(&source, &target, &params, capabilities);

        for page in 0..1500 {
            assert_eq!(byte_of(&target.ram, page), byte_of(&source.ram, page), "page {page}");
        }
        let by_news = params.zero_page_detection != ZeroPageDetection::None;
        assert_eq!(cleared, if by_news { 1000 } else { 0 }, "{params:?}");
    }
}

#[test]
fn zero_page_leaves_fresh_memory_alone_and_clears_what_the_vmm_did_not_know_of() {
    let (params, capabilities) = multifd(2);
    let (source, target) = (Plain::new(ram(1500)), Plain::new(ram(1500)));
    target.write(5, 0xee);
    source.write(0, 7);

    assert_eq!(move_plain(&source, &target, &params, capabilities), 1, "one page was there");

    assert_eq!(byte_of(&target.ram, 5), 0);
    assert!(target.ram.block(0).resident_bytes().unwrap() <= 64 * PAGE_SIZE as u64);
}

#[test]
fn zero_page_clears_what_came_before_with_content() {
    for (params, capabilities) in ways() {
        let (source, target) = (Plain::new(ram(1500)), Plain::new(ram(1500)));
        (0..1500).for_each(|page| source.write(page, 9));
        // Written as zero after they were sent: a single page, a run, and a range that is long enough to give memory
        // back.
        source.at_last(|vm| {
            [3..4, 100..140, 600..1400].into_iter().flatten().for_each(|page| vm.write(page, 0))
        });

        move_plain(&source, &target, &params, capabilities);

        for page in 0..1500 {
            let zero = page == 3 || (100..140).contains(&page) || (600..1400).contains(&page);
            assert_eq!(byte_of(&target.ram, page), if zero { 0 } else { 9 }, "page {page}, {params:?}");
        }
    }
}

#[test]
fn failed_migration_gives_the_destinations_memory_back() {
    let (params, capabilities) = multifd(2);
    let (source, target) = (Plain::new(ram(20_000)), Plain::new(ram(20_000)));
    (0..20_000).for_each(|page| source.write(page, 9));
    let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
    let incoming = Incoming::listen(vm, &any, params.clone(), capabilities, Arc::new(())).unwrap();
    let stop = Arc::new(Mutex::new(None::<Incoming>));
    *stop.lock().unwrap() = Some(incoming.clone());
    // The destination cancels when all of RAM has arrived, and the devices have not.
    source.at_last(move |_| stop.lock().unwrap().take().unwrap().cancel().unwrap());
    let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
    let migration = Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(())).unwrap();

    let (outcome, arrival) = (migration.wait(), incoming.wait());

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
    assert_eq!(target.ram.block(0).resident_bytes().unwrap(), 0);
    assert_eq!(source.ram.block(0).resident_bytes().unwrap(), 20_000 * PAGE_SIZE as u64);
}
