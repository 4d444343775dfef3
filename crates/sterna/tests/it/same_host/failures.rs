//! Until the commit the source can take everything back, and finds every byte as it was.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna::ram::GuestRam;
use sterna::{Capabilities, Incoming, Migration, Outcome, Status, Vm};

use super::{Place, Scribbler, contents, inodes, listen, migrate, parameters};
use crate::common;
use crate::support::hook::{Call, Journal, LeaseHook};
use crate::support::vm::TestDevice;
use crate::support::{self, TestVm, until_status, vm, vms};

/// A guest that stands, so that its memory can be compared byte for byte.
fn standing() -> (Arc<TestVm>, Arc<TestVm>, Vec<Vec<u8>>) {
    let (source, target) = vms();
    source.guest.pause().unwrap();
    let before = contents(&source.ram());
    (source, target, before)
}

/// The source has its guest, in its own memory, with every byte as it was; the target has nothing; and the two can try again.
fn assert_taken_back(source: &Arc<TestVm>, target: &Arc<TestVm>, before: &[Vec<u8>], memory: &[u64]) {
    assert!(contents(&source.ram()) == before, "bytes of the guest have changed");
    assert_eq!(inodes(&source.ram()), memory);
    assert!(source.ram().custody().may_run(), "{:?}", source.ram().custody());
    support::assert_reset(target);
    assert!(is_zero(&target.ram()), "memory of the source's guest stays at the target");
    source.guest.cont().unwrap();
    common::assert_lives_on(&source.guest);
}

fn is_zero(ram: &GuestRam) -> bool {
    contents(ram).iter().flatten().all(|byte| *byte == 0)
}

fn ended(migration: &Migration, incoming: &Incoming) -> Outcome {
    let outcome = migration.wait();
    support::ended(incoming);
    outcome
}

#[test]
fn cancel_before_the_commit_takes_everything_back() {
    let (source, target, before) = standing();
    let memory = inodes(&source.ram());
    let capabilities = Capabilities { pause_before_switchover: true, ..Capabilities::default() };
    let place = Place::new();
    let incoming = listen(&target, &place, &parameters(), capabilities);
    let migration = vm::start(&source, &incoming.address(), &parameters(), capabilities, Arc::new(()));
    until_status(&migration, Status::PreSwitchover);
    // By now the target has it mapped.
    assert!(contents(&target.ram()) == before);
    assert_eq!(inodes(&source.ram()), memory, "the source unmaps nothing");

    migration.cancel().unwrap();

    assert!(matches!(ended(&migration, &incoming), Outcome::Cancelled));
    assert_taken_back(&source, &target, &before, &memory);
}

#[test]
fn destination_that_gives_up_before_the_commit_leaves_every_byte() {
    let (source, target, before) = standing();
    let memory = inodes(&source.ram());
    let capabilities = Capabilities { pause_before_switchover: true, ..Capabilities::default() };
    let place = Place::new();
    let incoming = listen(&target, &place, &parameters(), capabilities);
    let migration = vm::start(&source, &incoming.address(), &parameters(), capabilities, Arc::new(()));
    until_status(&migration, Status::PreSwitchover);

    incoming.cancel().unwrap();

    assert!(matches!(ended(&migration, &incoming), Outcome::Failed { held: false, .. }));
    assert_taken_back(&source, &target, &before, &memory);
}

#[test]
fn device_that_writes_memory_as_it_is_loaded_is_refused_and_changes_no_byte() {
    let (source, target, before) = standing();
    let memory = inodes(&source.ram());
    Scribbler::on([&source, &target]);
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    let sterna::Arrival::Failed(error) = &moved.arrival else { panic!("{:?}", moved.arrival) };
    assert!(error.to_string().contains("read-only"), "{error}");
    assert_taken_back(&source, &target, &before, &memory);
}

#[test]
fn device_that_is_not_loaded_leaves_every_byte() {
    let (source, target, before) = standing();
    let memory = inodes(&source.ram());
    for (machine, fails) in [(&source, false), (&target, true)] {
        let device = TestDevice::new("fragile", 1);
        device.fail_load.store(fails, Ordering::SeqCst);
        machine.guest.add_device(device);
    }
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    assert_taken_back(&source, &target, &before, &memory);
}

/// All is loaded by then.
#[test]
fn hook_that_is_not_acquired_leaves_every_byte() {
    let (source, target, before) = standing();
    let memory = inodes(&source.ram());
    let journal = Arc::new(Journal::default());
    let (ours, theirs, _lease) = LeaseHook::pair("disk", &journal);
    *theirs.fails.lock().unwrap() = Some((Call::Acquire, 1));
    source.guest.add_hook(ours);
    target.guest.add_hook(theirs);
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    assert_taken_back(&source, &target, &before, &memory);
}

/// The source's guest writes until it stops, and goes on in the same memory after each failure.
#[test]
fn running_guest_goes_on_after_each_failure_and_moves_at_last() {
    let (source, target) = vms();
    let capabilities = Capabilities { pause_before_switchover: true, ..Capabilities::default() };
    for _ in 0..5 {
        let place = Place::new();
        let incoming = listen(&target, &place, &parameters(), capabilities);
        let migration = vm::start(&source, &incoming.address(), &parameters(), capabilities, Arc::new(()));
        until_status(&migration, Status::PreSwitchover);
        migration.cancel().unwrap();
        assert!(matches!(ended(&migration, &incoming), Outcome::Cancelled));
        common::assert_lives_on(&source.guest);
        support::assert_reset(&target);
    }
    migrate(&source, &target, &parameters(), Capabilities::default()).assert_arrived(&target);
}

/// The target says that the guest never ran there and never will: the source has it again, and the target lets go of memory that
/// was its own by then.
#[test]
fn start_that_fails_after_the_commit_gives_the_guest_back() {
    let (source, target, before) = standing();
    source.guest.cont().unwrap();
    drop(before);
    let memory = inodes(&source.ram());
    target.fail_start.store(true, Ordering::SeqCst);
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    assert_eq!(inodes(&source.ram()), memory);
    assert!(inodes(&target.ram()).iter().all(|inode| !memory.contains(inode)));
    assert!(is_zero(&target.ram()));
    common::assert_lives_on(&source.guest);
}
