//! Destinations that break a rule: the checks of the failure tests detect the damage to the source's guest.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna::{Capabilities, Incoming, Outcome, SharingFault, Vm};

use super::{Place, Scribbler, contents, parameters};
use crate::support::hook::{Call, Journal, LeaseHook};
use crate::support::vm::TestDevice;
use crate::support::{self, TestVm, vm, vms};

/// Whether the source's memory has changed after a failed migration to a target with this fault.
fn changes(fault: SharingFault, prepare: impl Fn(&Arc<TestVm>, &Arc<TestVm>)) -> bool {
    let (source, target) = vms();
    source.guest.pause().unwrap();
    prepare(&source, &target);
    let before = contents(&source.ram());
    let place = Place::new();
    let capabilities = Capabilities::default();
    let incoming = Incoming::listen_with_fault(
        Arc::clone(&target) as _,
        &place.address(),
        parameters(),
        capabilities,
        Arc::new(()),
        fault,
    );
    let incoming = incoming.unwrap();
    let migration = vm::start(&source, &incoming.address(), &parameters(), capabilities, Arc::new(()));
    let outcome = migration.wait();
    support::ended(&incoming);
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    contents(&source.ram()) != before
}

fn refuse_at_the_end(source: &Arc<TestVm>, target: &Arc<TestVm>) {
    let (ours, theirs, _lease) = LeaseHook::pair("disk", &Arc::new(Journal::default()));
    *theirs.fails.lock().unwrap() = Some((Call::Acquire, 1));
    source.guest.add_hook(ours);
    target.guest.add_hook(theirs);
}

#[test]
fn memory_that_is_written_by_a_device_before_the_commit_is_found() {
    let scribbles = |source: &Arc<TestVm>, target: &Arc<TestVm>| {
        Scribbler::on([source, target]);
        refuse_at_the_end(source, target);
    };
    assert!(changes(SharingFault::WritesEarly, scribbles));
    // The fault alone writes nothing.
    assert!(!changes(SharingFault::WritesEarly, refuse_at_the_end));
}

#[test]
fn memory_that_is_cleared_when_all_has_come_is_found() {
    assert!(changes(SharingFault::Empties, refuse_at_the_end));
}

#[test]
fn memory_that_is_given_back_after_a_failure_is_found() {
    let fragile = |source: &Arc<TestVm>, target: &Arc<TestVm>| {
        for (machine, fails) in [(source, false), (target, true)] {
            let device = TestDevice::new("fragile", 1);
            device.fail_load.store(fails, Ordering::SeqCst);
            machine.guest.add_device(device);
        }
    };
    assert!(changes(SharingFault::Empties, fragile));
}
