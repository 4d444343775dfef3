//! The engine records who has a VM's guest. It refuses any call that would run the guest twice, or without its disks.

use crate::common;

use std::sync::Arc;

use crate::support::hook::{Call, Journal, LeaseHook, Side};
use crate::support::proxy::{Line, Proxy, Verdict, Way, at_pattern};
use crate::support::trapped::{Bomb, Trapped};
use crate::support::{TestVm, assert_next_works, case, small, until_status, vm, vms};
use sterna::ram::Custody;
use sterna::{
    Address, Arrival, Capabilities, Decision, Event, Incoming, Migration, Outcome, Parameters, SourceVm,
    StartError, Status, StatusQuestions, TargetVm, Vm, WaitLimits,
};
use sterna_guests::process::ProcessGuest;

/// Limits that a busy machine meets, and a short one for taking hooks back.
fn params() -> Parameters {
    let limits = WaitLimits { prepare: std::time::Duration::from_secs(2), ..common::LIMITS };
    Parameters { limits, ..common::parameters() }
}

/// An address at which no destination listens.
fn dead() -> Address {
    "tcp:127.0.0.1:1".parse().unwrap()
}

fn custody(vm: &TestVm) -> Custody {
    vm.ram().custody()
}

/// Asserts that another migration is refused, with a message that contains the next step.
#[track_caller]
fn assert_stays(source: &Arc<TestVm>, expected: Custody, advice: &str) {
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    let refused = Migration::start(vm, &dead(), params(), Capabilities::default(), Arc::new(())).err();
    let Some(StartError::Guest(custody)) = refused else { panic!("{refused:?}") };
    assert_eq!((custody, self::custody(source)), (expected, expected));
    let text = StartError::Guest(custody).to_string();
    assert!(text.contains(advice), "{text}");
}

fn listen(target: &Arc<TestVm>) -> Result<Incoming, StartError> {
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let any = "tcp:127.0.0.1:0".parse().unwrap();
    Incoming::listen(vm, &any, params(), Capabilities::default(), Arc::new(()))
}

#[test]
fn held_guest_is_not_forgotten_by_the_next_migration() {
    case("held", || {
        let (source, target) = vms();
        let (ours, theirs, lease) = LeaseHook::pair("disk", &Arc::new(Journal::default()));
        source.guest.add_hook(Arc::clone(&ours) as _);
        target.guest.add_hook(Arc::clone(&theirs) as _);
        *theirs.fails.lock().unwrap() = Some((Call::Acquire, 1));
        *ours.fails.lock().unwrap() = Some((Call::TakeBack, u32::MAX));
        let incoming = listen(&target).expect("listening");
        let migration =
            vm::start(&source, &incoming.address(), &params(), Capabilities::default(), Arc::new(()));
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: true, .. }), "{outcome:?}");
        incoming.wait();

        assert_stays(&source, Custody::Held, "Migration::retry");
        listen(&source).map(drop).expect_err("another guest would take its place");
        assert!(!migration.may_guest_run());
        assert!(migration.while_guest_is_free(|| ()).is_none());
        assert_eq!((lease.holder(), source.run_state()), (None, sterna::RunState::Paused));

        *ours.fails.lock().unwrap() = None;
        migration.retry().expect("held");
        assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
        assert_eq!((lease.holder(), custody(&source)), (Some(Side::Source), Custody::Free));
        assert!(migration.may_guest_run());
        common::assert_lives_on(&source.guest);
        drop(incoming);
        assert_next_works(&source, &target);
    });
}

#[test]
fn guest_that_has_left_is_not_migrated_again_and_goes_on_from_where_it_is() {
    case("gone", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        let migration =
            vm::start(&source, &incoming.address(), &params(), Capabilities::default(), Arc::new(()));
        let outcome = migration.wait();
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
        assert_stays(&source, Custody::Gone, "destination");
        assert!(!migration.may_guest_run());
        assert_eq!(custody(&target), Custody::Arrived);
        assert_no_place(&target);

        let back = listen(&source).expect("another may come in its place");
        assert_stays(&source, Custody::Arriving { is_free: false }, "wait");
        drop(back);
        assert_stays(&source, Custody::Gone, "destination");
        let third = TestVm::new(ProcessGuest::waiting(small()).unwrap());
        let further = listen(&third).expect("listening");
        let onward = vm::start(&target, &further.address(), &params(), Capabilities::default(), Arc::new(()));
        common::assert_arrived(&onward.wait(), &further.wait(), &third.guest);
        assert_eq!((custody(&target), custody(&third)), (Custody::Gone, Custody::Arrived));
        assert!(!migration.may_guest_run());
    });
}

/// Asserts that another guest is refused, because it would replace the guest that is here.
#[track_caller]
fn assert_no_place(target: &Arc<TestVm>) {
    let refused = listen(target).err();
    assert!(matches!(refused, Some(StartError::Guest(Custody::Arrived))), "{refused:?}");
}

#[test]
fn guest_that_has_arrived_keeps_its_place_whatever_is_tried_with_it() {
    case("arrived", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        let migration =
            vm::start(&source, &incoming.address(), &params(), Capabilities::default(), Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        drop(incoming);
        assert_no_place(&target);
        // A migration that fails, and a save that is resumed, leave the guest here as before.
        let failed = vm::start(&target, &dead(), &params(), Capabilities::default(), Arc::new(()));
        assert!(matches!(failed.wait(), Outcome::Failed { held: false, .. }));
        assert_no_place(&target);
        saved(&target).resume_saved().expect("saved");
        assert_no_place(&target);
        common::assert_lives_on(&target.guest);
        // The VMM discards its guest.
        target.guest.quit();
        target.ram().has_no_guest().expect("it is the VMM's");
        assert!(listen(&target).is_ok());
    });
}

#[test]
fn undecided_guest_is_not_migrated_until_it_is_decided() {
    case("undecided", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        let shut = at_pattern(Line::Main, Way::Back, &[0, 1, 0, 4, 0, 0, 0], false, Verdict::Cut);
        let proxy = Proxy::new(&incoming.address(), shut);
        // The source does not ask the destination, so only the operator can decide.
        let params = Parameters { status_questions: StatusQuestions::Operator, ..params() };
        let migration = vm::start(&source, &proxy.address(), &params, Capabilities::default(), Arc::new(()));
        until_status(&migration, Status::Undecided);
        assert_stays(&source, Custody::Undecided, "Migration::decide");
        assert!(matches!(incoming.wait(), Arrival::Completed(_)));
        migration.decide(Decision::DestinationRuns).expect("undecided");
        assert!(matches!(migration.wait(), Outcome::Completed));
        assert_stays(&source, Custody::Gone, "destination");
        common::assert_lives_on(&target.guest);
    });
}

#[test]
fn saved_guest_is_not_migrated_until_it_runs_again() {
    case("saved", || {
        let (source, target) = vms();
        let directory = tempfile::tempdir().unwrap();
        let to = Address::File { path: directory.path().join("image"), offset: 0 };
        let migration = vm::start(&source, &to, &params(), Capabilities::default(), Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Completed));
        assert!(migration.is_saved() && !migration.may_guest_run());
        assert_stays(&source, Custody::Saved, "Migration::resume_saved");
        migration.resume_saved().expect("saved");
        assert!(!migration.is_saved() && migration.may_guest_run());
        migration.resume_saved().expect_err("it runs");
        common::assert_lives_on(&source.guest);
        assert_next_works(&source, &target);
    });
}

/// Saves `source`'s guest. An operator may resume it afterwards.
fn saved(source: &Arc<TestVm>) -> Migration {
    let directory = tempfile::tempdir().unwrap();
    let to = Address::File { path: directory.path().join("image"), offset: 0 };
    let migration = vm::start(source, &to, &params(), Capabilities::default(), Arc::new(()));
    assert!(matches!(migration.wait(), Outcome::Completed));
    migration
}

#[test]
fn saved_guest_that_is_resumed_at_once_is_its_vmms_when_it_runs() {
    case("at once", || {
        let (source, target) = vms();
        let directory = tempfile::tempdir().unwrap();
        let to = Address::File { path: directory.path().join("image"), offset: 0 };
        // The migration has completed, but the tracking of writes is not stopped yet.
        let slow = Bomb::waiting("DirtySource::stop");
        let (completes, completed) = std::sync::mpsc::channel();
        let observer = move |event: &Event| {
            if *event == Event::Status(Status::Completed) {
                completes.send(()).unwrap();
            }
        };
        let guest: Arc<dyn SourceVm> = Trapped::source(&source, &slow);
        let migration =
            Migration::start(guest, &to, params(), Capabilities::default(), Arc::new(observer)).unwrap();
        completed.recv().unwrap();
        let resuming = std::thread::spawn({
            let migration = migration.clone();
            move || migration.resume_saved()
        });
        // Time for the operator's call to come first. If it comes later, this run proves less.
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_eq!(source.run_state(), sterna::RunState::Paused);
        slow.disarm();
        resuming.join().unwrap().expect("saved");
        assert_eq!((custody(&source), source.run_state()), (Custody::Free, sterna::RunState::Running));
        assert!(!migration.is_saved());
        migration.resume_saved().expect_err("it runs");
        common::assert_lives_on(&source.guest);
        assert_next_works(&source, &target);
    });
}

#[test]
fn waiting_in_vain_leaves_a_saved_guest_to_be_resumed() {
    case("in its place", || {
        let (source, target) = vms();
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let busy: Address = format!("tcp:{}", taken.local_addr().unwrap()).parse().unwrap();
        for refused in [true, false] {
            let migration = saved(&source);
            if refused {
                let vm: Arc<dyn TargetVm> = Arc::clone(&source) as _;
                let why = Incoming::listen(vm, &busy, params(), Capabilities::default(), Arc::new(())).err();
                assert!(matches!(why, Some(StartError::System(_))), "{why:?}");
            } else {
                let incoming = listen(&source).expect("another may come in its place");
                assert!(!migration.is_saved());
                migration.resume_saved().expect_err("another may come in its place");
                incoming.cancel().expect("nothing came");
            }
            assert_eq!((custody(&source), migration.is_saved()), (Custody::Saved, true));
            migration.resume_saved().expect("saved");
            assert_eq!(custody(&source), Custody::Free);
            common::assert_lives_on(&source.guest);
        }
        assert_next_works(&source, &target);
    });
}

#[test]
fn guest_in_a_migration_is_not_migrated_twice_nor_measured() {
    case("leaving", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        let slow = Parameters { max_bandwidth_bytes: 200_000, ..common::parameters() };
        let migration = vm::start(&source, &incoming.address(), &slow, Capabilities::default(), Arc::new(()));
        assert_stays(&source, Custody::Leaving { is_free: true }, "wait");
        let measured = sterna::dirty_rate::DirtyRateMeasurement::start(
            Arc::clone(&source) as _,
            std::time::Duration::from_millis(50),
        );
        assert!(matches!(measured, Err(StartError::Tracked)), "{measured:?}");
        assert!(listen(&target).is_err(), "one migration at a time into one VM");
        // Earlier, the destination may not know of the migration, and would wait for another one.
        until_status(&migration, Status::Active);
        migration.cancel().expect("before the commit");
        assert!(matches!(migration.wait(), Outcome::Cancelled));
        assert_eq!(custody(&source), Custody::Free);
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        drop(incoming);
        assert_next_works(&source, &target);
    });
}

#[test]
fn migration_that_failed_to_bring_a_guest_leaves_none() {
    case("no guest", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        vm::order(&target.fail_start, true);
        let migration =
            vm::start(&source, &incoming.address(), &params(), Capabilities::default(), Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        assert_stays(&target, Custody::NoGuest, "has_new_guest");
        target.ram().has_new_guest().expect("as if it had booted");
        assert_eq!(custody(&target), Custody::Free);
        vm::order(&target.fail_start, false);
        drop(incoming);
        assert_next_works(&source, &target);
    });
}

#[test]
fn waiting_in_vain_changes_nothing() {
    case("in vain", || {
        let (source, target) = vms();
        let incoming = listen(&target).expect("listening");
        assert_eq!(custody(&target), Custody::Arriving { is_free: false });
        incoming.cancel().expect("nothing came");
        assert_eq!(custody(&target), Custody::Free);
        drop(incoming);
        drop(listen(&target).expect("listening"));
        assert_eq!(custody(&target), Custody::Free);
        assert_next_works(&source, &target);
    });
}
