//! Machines that differ, and machines that fail: the refusal names the cause, before or after RAM was sent.

use crate::common;

use std::sync::Arc;

use crate::support;
use crate::support::vm::{TestDevice, order};
use crate::support::{TestVm, assert_failed, assert_next_works, case, small, vm, vm_error, vms};
use sterna::error::{Difference, MachineDifference};
use sterna::{Arrival, Capabilities, Fault, MigrationError, Outcome, SourceVm, Status};
use sterna_guests::process::{ProcessConfig, ProcessGuest};

fn migrate(source: &Arc<TestVm>, target: &Arc<TestVm>) -> (Outcome, Arrival, u64) {
    let (params, capabilities) = common::multifd(2);
    let incoming = vm::listen(target, &params, capabilities);
    let migration = vm::start(source, &incoming.address(), &params, capabilities, Arc::new(()));
    let ends = (migration.wait(), support::ended(&incoming));
    let stats = incoming.statistics();
    (ends.0, ends.1, stats.normal_pages + stats.zero_pages)
}

/// Migrates to a destination that must refuse. Returns its reason, and the number of pages that it had received.
fn refused(source: &Arc<TestVm>, target: &Arc<TestVm>) -> (MigrationError, u64) {
    let (outcome, arrival, pages) = migrate(source, target);
    (assert_failed(&outcome, &arrival, source, target).1, pages)
}

fn assert_refused_early(source: &Arc<TestVm>, target: &Arc<TestVm>, words: &[&str]) {
    let (why, pages) = refused(source, target);
    assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
    assert_eq!(pages, 0, "{why}");
    let text = why.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

/// Asserts that the destination rejects the source with a reason that contains `words`, and waits for the next
/// source.
fn assert_turned_away(source: &Arc<TestVm>, target: &Arc<TestVm>, words: &[&str]) {
    let (mut params, capabilities) = common::multifd(2);
    params.limits = support::short_limits();
    let log = Arc::new(common::Log::default());
    let incoming = vm::listen_told(target, &params, capabilities, Arc::clone(&log) as _);
    let migration = vm::start(source, &incoming.address(), &params, capabilities, Arc::new(()));
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    common::assert_lives_on(&source.guest);
    let told = || support::warnings(&log.events());
    support::eventually(&format!("{words:?}"), || {
        told().iter().any(|text| words.iter().all(|word| text.contains(word)))
    });
    assert_eq!(incoming.status(), Status::Setup, "the next one may come");
}

fn source_of(config: ProcessConfig) -> Arc<TestVm> {
    common::trace();
    let guest = ProcessGuest::boot(config).unwrap();
    guest.cont().unwrap();
    TestVm::new(guest)
}

#[test]
fn compatibility_record_that_does_not_fit_is_refused_before_ram() {
    case("level", || {
        let source = source_of(ProcessConfig { level: 2, ..small() });
        let target = TestVm::new(ProcessGuest::waiting(small()).unwrap());
        assert_refused_early(&source, &target, &["level"]);
    });
}

#[test]
fn other_ram_is_refused_before_a_page() {
    let sizes = [
        (vec![("ram.low".into(), 3 << 20), ("ram.up".into(), 1 << 20)], "ram.high"),
        (vec![("ram.low".into(), 1 << 20), ("ram.high".into(), 3 << 20)], "ram.low"),
    ];
    for (blocks, named) in sizes {
        case("blocks", || {
            let source = source_of(small());
            let target = TestVm::new(ProcessGuest::waiting(ProcessConfig { blocks, ..small() }).unwrap());
            assert_refused_early(&source, &target, &[named]);
        });
    }
}

#[test]
fn other_machine_type_is_refused() {
    case("machine type", || {
        let (source, target) = vms();
        target.is_machine("sterna-process-2");
        assert_turned_away(&source, &target, &["sterna-process-2"]);
        target.is_machine("sterna-process");
        assert_next_works(&source, &target);
    });
}

#[test]
fn other_uuid_is_refused() {
    for ours in [Some([1; 16]), None] {
        case("uuid", || {
            let (source, target) = vms();
            *source.uuid.lock().unwrap() = ours;
            *target.uuid.lock().unwrap() = Some([2; 16]);
            assert_turned_away(&source, &target, &["UUID"]);
            *target.uuid.lock().unwrap() = ours;
            assert_next_works(&source, &target);
        });
    }
}

#[test]
fn missing_unknown_or_newer_device_is_refused_by_name() {
    let cases: [(Option<u32>, Option<u32>, &str); 4] = [
        (Some(1), None, "no device"),
        (None, Some(1), "sent no state"),
        (Some(2), Some(1), "\"extra\" is 2"),
        (Some(1), Some(2), "\"extra\" is 1"),
    ];
    for (ours, theirs, words) in cases {
        case(words, || {
            let (source, target) = vms();
            for (vm, version) in [(&source, ours), (&target, theirs)] {
                if let Some(version) = version {
                    vm.guest.add_device(TestDevice::new("extra", version));
                }
            }
            let (why, _) = refused(&source, &target);
            assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
            match &why {
                MigrationError::PeerIncompatible(Difference::Machine(MachineDifference::NoState {
                    device,
                    ..
                })) => assert!(device == "extra" && ours.is_none(), "{why}"),
                // Device and version are parts of the decoder's rule, which is a text.
                MigrationError::Wire { error, .. } => {
                    assert!(error.rule.contains("extra") && error.rule.contains(words), "{why}");
                }
                _ => panic!("{why:?}"),
            }
        });
    }
}

#[test]
fn device_that_cannot_be_saved_or_loaded_fails_and_the_source_runs_on() {
    for save in [true, false] {
        case("device", || {
            let (source, target) = vms();
            let (ours, theirs) = (TestDevice::new("extra", 1), TestDevice::new("extra", 1));
            source.guest.add_device(Arc::clone(&ours) as _);
            target.guest.add_device(Arc::clone(&theirs) as _);
            order(if save { &ours.fail_save } else { &theirs.fail_load }, true);
            let (outcome, arrival, _) = migrate(&source, &target);
            let (error, why) = assert_failed(&outcome, &arrival, &source, &target);
            let reason = if save { &error } else { &why };
            assert_eq!(vm_error(reason).what, if save { "save" } else { "load" });
            assert_eq!(reason.fault(), Some(Fault::Local));
            order(&ours.fail_save, false);
            order(&theirs.fail_load, false);
            assert_next_works(&source, &target);
        });
    }
}

#[test]
fn guest_that_cannot_be_stopped_runs_on() {
    case("stop", || {
        let (source, target) = vms();
        order(&source.fail_stop, true);
        let (outcome, arrival, _) = migrate(&source, &target);
        order(&source.fail_stop, false);
        let (error, _) = assert_failed(&outcome, &arrival, &source, &target);
        assert_eq!(vm_error(&error).what, "stop");
        assert_eq!(*source.resumes.lock().unwrap(), 0, "it never stood still");
        assert_next_works(&source, &target);
    });
}

#[test]
fn paused_guest_of_a_failed_migration_stays_paused() {
    case("paused", || {
        let (source, target) = vms();
        source.guest.pause().unwrap();
        let (ours, theirs) = (TestDevice::new("extra", 1), TestDevice::new("extra", 1));
        source.guest.add_device(Arc::clone(&ours) as _);
        target.guest.add_device(theirs);
        order(&ours.fail_save, true);
        let (outcome, _, _) = migrate(&source, &target);
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        assert_eq!(source.run_state(), sterna::RunState::Paused);
        assert!(source.guest.check().unwrap().is_consistent());
        source.guest.cont().unwrap();
        order(&ours.fail_save, false);
        assert_next_works(&source, &target);
    });
}

#[test]
fn switchover_ack_works_in_both_forms() {
    for machine in ["pc-q35-11.0", "pc-q35-11.1", "sterna-process"] {
        case(machine, || {
            let (source, target) = vms();
            source.is_machine(machine);
            target.is_machine(machine);
            let (params, mut capabilities) = common::multifd(2);
            capabilities.switchover_ack = true;
            let incoming = vm::listen(&target, &params, capabilities);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        });
    }
}

#[test]
fn switchover_ack_of_the_old_form_is_waited_for() {
    case("ack off at the destination", || {
        let (source, target) = vms();
        source.is_machine("pc-q35-11.0");
        target.is_machine("pc-q35-11.0");
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let waits = Capabilities { switchover_ack: true, ..capabilities };
        let migration = vm::start(&source, &incoming.address(), &params, waits, Arc::new(()));
        support::eventually("rounds", || migration.statistics().rounds_begun > 3);
        assert_eq!(migration.status(), Status::Active, "it switched over without the acknowledgement");
        migration.cancel().expect("cancelling");
        assert!(matches!(migration.wait(), Outcome::Cancelled));
        support::ended(&incoming);
        common::assert_lives_on(&source.guest);
    });
}
