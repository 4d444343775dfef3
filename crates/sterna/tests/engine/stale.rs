//! Content that an earlier migration left in the destination's memory does not survive the next migration, whatever
//! the kernel refuses.

use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::common::*;
use crate::plain::{Plain, byte_of};
use rustix::mm::{MlockAllFlags, mlockall};
use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm,
    ZeroPageDetection,
};

const PAGES: u64 = 6000;
const ALONE: &str = "STERNA_TEST_LOCKS_MEMORY";

fn plain(backing: Backing) -> Arc<Plain> {
    let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, backing).unwrap();
    Plain::new(GuestRam::new(vec![block]).unwrap())
}

fn run(
    source: &Arc<Plain>,
    target: &Arc<Plain>,
    params: &Parameters,
    capabilities: Capabilities,
    is_given_up: bool,
) -> (Outcome, Arrival) {
    let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
    // The guest that has arrived is discarded.
    target.ram.has_no_guest().unwrap();
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming = Incoming::listen(vm, &any, params.clone(), capabilities, Arc::new(())).unwrap();
    if is_given_up {
        // The destination cancels when all of RAM has arrived, and the devices have not.
        let stop = Mutex::new(Some(incoming.clone()));
        source.at_last(move |_| stop.lock().unwrap().take().unwrap().cancel().unwrap());
    }
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    let to = incoming.address();
    let migration = Migration::start(vm, &to, params.clone(), capabilities, Arc::new(())).unwrap();
    (migration.wait(), incoming.wait())
}

/// A guest with some written pages, and zero pages between them: single ones, runs, and long ranges.
fn sparse_source(backing: Backing) -> Arc<Plain> {
    let source = plain(backing);
    (0..PAGES).filter(|page| page % 7 == 0 && *page < 3000).for_each(|page| source.write(page, 3));
    source
}

fn ways() -> Vec<(Parameters, Capabilities)> {
    let mut ways = Vec::new();
    for detection in [ZeroPageDetection::Multifd, ZeroPageDetection::Legacy] {
        for on in [true, false] {
            let (mut params, mut capabilities) = multifd(2);
            params.zero_page_detection = detection;
            capabilities.multifd = on;
            ways.push((params, capabilities));
        }
    }
    ways
}

fn nothing_survives(backing: Backing) {
    for (params, capabilities) in ways() {
        for is_given_up in [true, false] {
            // Arrange: a migration that fails, or completes, after every page arrived with content.
            let (first, target) = (plain(backing), plain(backing));
            (0..PAGES).for_each(|page| first.write(page, 9));
            let (outcome, _) = run(&first, &target, &params, capabilities, is_given_up);
            assert_eq!(matches!(outcome, Outcome::Completed), !is_given_up, "{outcome:?}");
            let second = sparse_source(backing);

            let (outcome, arrival) = run(&second, &target, &params, capabilities, false);

            assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
            assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
            for page in 0..PAGES {
                let (there, here) = (byte_of(&second.ram, page), byte_of(&target.ram, page));
                assert_eq!(
                    here, there,
                    "page {page} of {backing:?}, first given up: {is_given_up}, {params:?}"
                );
            }
        }
    }
}

#[test]
fn stale_pages_of_a_former_migration_are_cleared() {
    nothing_survives(Backing::Memfd);
    nothing_survives(Backing::Anonymous);
}

#[test]
fn stale_pages_in_locked_memory_are_cleared() {
    // All memory of the process gets locked, so this process runs nothing else.
    if std::env::var_os(ALONE).is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        let alone = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture", "--test-threads=1"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        say(&String::from_utf8_lossy(&alone.stderr));
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stdout));
        return;
    }
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        return say(&format!("SKIPPED stale_pages_in_locked_memory_are_cleared: mlockall: {error}"));
    }
    nothing_survives(Backing::Anonymous);
    nothing_survives(Backing::Memfd);
}

#[allow(clippy::print_stderr, reason = "says what was skipped")]
fn say(line: &str) {
    eprintln!("{line}");
}
