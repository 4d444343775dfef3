//! Until the commit the source can take everything back, and every byte is unchanged.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::ram::{Backing, GuestRam, RamBlock, RamError};
use sterna::{Arrival, Capabilities, HostDescriptors, Incoming, Migration, Outcome, Status, Vm, VmError};

use super::{Place, Scribbler, contents, inodes, listen, migrate, parameters};
use crate::common;
use crate::plain::{Plain, byte_of};
use crate::support::hook::{Call, Journal, LeaseHook};
use crate::support::vm::TestDevice;
use crate::support::{self, PATIENCE, TestVm, until_status, vm, vm_error, vms};

/// A paused guest, so that its memory can be compared byte for byte.
fn standing() -> (Arc<TestVm>, Arc<TestVm>, Vec<Vec<u8>>) {
    let (source, target) = vms();
    source.guest.pause().unwrap();
    let before = contents(&source.ram());
    (source, target, before)
}

/// Asserts that the source has its guest in its own memory, with every byte unchanged, that the target has nothing,
/// and that a retry succeeds.
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
    // By now the target has mapped the memory.
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
    let read_only = RamError::ReadOnly { block: "ram.low".into() };
    assert_eq!(vm_error(error).why, read_only.to_string());
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

/// The failure happens when all state is loaded.
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

/// Descriptors that the machine takes slowly: it reports that it has begun, and waits.
struct Slow(Mutex<Option<(Sender<()>, Receiver<()>)>>);

impl HostDescriptors for Slow {
    fn name(&self) -> String {
        "slow".to_owned()
    }
    fn give(&self) -> Result<Vec<OwnedFd>, VmError> {
        Ok(Vec::new())
    }
    fn take(&self, _: Vec<OwnedFd>) -> Result<(), VmError> {
        if let Some((begun, may_end)) = self.0.lock().unwrap().take() {
            begun.send(()).unwrap();
            may_end.recv_timeout(PATIENCE).unwrap();
        }
        Ok(())
    }
    fn let_go(&self) {}
}

/// The destination fails while it maps the offered memory.
#[test]
fn memory_that_is_being_taken_when_the_migration_fails_is_given_back() {
    let ram = || GuestRam::new(vec![RamBlock::new("m0", 1 << 20, Backing::Memfd).unwrap()]).unwrap();
    let (source, target) = (Plain::new(ram()), Plain::new(ram()));
    (0..256).for_each(|page| source.write(page, 7));
    let ((begun, has_begun), (end, may_end)) = (channel(), channel());
    source.add_descriptors(Arc::new(Slow(Mutex::default())));
    target.add_descriptors(Arc::new(Slow(Mutex::new(Some((begun, may_end))))));
    let (ours, theirs) = (inodes(&source.ram), inodes(&target.ram));
    let (place, params, off) = (Place::new(), parameters(), Capabilities::default());
    let vm = Arc::clone(&target) as _;
    let incoming = Incoming::listen(vm, &place.address(), params.clone(), off, Arc::new(())).unwrap();
    let vm = Arc::clone(&source) as _;
    let migration = Migration::start(vm, &incoming.address(), params, off, Arc::new(())).unwrap();
    has_begun.recv_timeout(PATIENCE).unwrap();

    incoming.cancel().unwrap();
    // Time for the destination to advance as far as it can without the awaited event.
    std::thread::sleep(Duration::from_millis(300));
    end.send(()).unwrap();

    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(inodes(&target.ram), theirs, "the source's memory stays mapped");
    assert!(is_zero(&target.ram));
    assert_eq!(inodes(&source.ram), ours);
    assert!((0..256).all(|page| byte_of(&source.ram, page) == 7));
}

/// The source's guest writes until it stops, and resumes in the same memory after each failure.
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

/// The target answers that the guest never ran there and never will. The source has it again, and the target releases
/// the memory, which it already owned.
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
