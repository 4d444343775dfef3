//! Hooks (disks, locks) are handed over with the guest: at any time only one side has them, and a failure undoes the
//! handover.

use crate::common;

use std::sync::Arc;

use crate::support;
use crate::support::hook::{Call, Journal, LeaseHook, Side};
use crate::support::{TestVm, assert_failed, assert_next_works, case, eventually, vm, vm_error, vms};
use sterna::{Arrival, Event, Outcome, Status, Vm};

struct Bench {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    journal: Arc<Journal>,
    /// For each lease: the source's hook, the destination's hook, and the lease.
    hooks: Vec<(Arc<LeaseHook>, Arc<LeaseHook>, Arc<support::hook::Lease>)>,
}

impl Bench {
    fn new() -> Self {
        let (source, target) = vms();
        let journal = Arc::new(Journal::default());
        let hooks: Vec<_> =
            ["disk", "lock", "net"].iter().map(|name| LeaseHook::pair(name, &journal)).collect();
        for (ours, theirs, _) in &hooks {
            source.guest.add_hook(Arc::clone(ours) as _);
            target.guest.add_hook(Arc::clone(theirs) as _);
        }
        Self { source, target, journal, hooks }
    }

    fn migrate(&self) -> (sterna::Migration, Outcome, Arrival) {
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&self.target, &params, capabilities);
        let migration = vm::start(&self.source, &incoming.address(), &params, capabilities, Arc::new(()));
        let ends = (migration.wait(), incoming.wait());
        (migration, ends.0, ends.1)
    }

    fn all_held_by(&self, side: Side) -> bool {
        self.hooks.iter().all(|(_, _, lease)| lease.holder() == Some(side))
    }
}

fn names(of: &[&str]) -> Vec<String> {
    of.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn hooks_of_a_finished_migration_are_called_once_and_in_order() {
    case("hooks", || {
        let bench = Bench::new();
        let (_, outcome, arrival) = bench.migrate();
        common::assert_arrived(&outcome, &arrival, &bench.target.guest);
        let calls: Vec<_> = bench.journal.calls();
        let expected: Vec<_> = [Call::Release, Call::Acquire, Call::Announce]
            .into_iter()
            .flat_map(|call| ["disk", "lock", "net"].map(|name| (name.to_owned(), call)))
            .collect();
        assert_eq!(calls, expected);
        assert!(bench.all_held_by(Side::Destination));
    });
}

#[test]
fn release_that_fails_is_undone_in_reverse() {
    for (failing, released) in [(0, &["disk"][..]), (1, &["lock", "disk"]), (2, &["net", "lock", "disk"])] {
        case("release fails", || {
            let bench = Bench::new();
            *bench.hooks[failing].0.fails.lock().unwrap() = Some((Call::Release, 1));
            let (_, outcome, arrival) = bench.migrate();
            let (error, _) = assert_failed(&outcome, &arrival, &bench.source, &bench.target);
            assert_eq!(vm_error(&error).why, "told to fail");
            assert_eq!(bench.journal.of(Call::TakeBack), names(released));
            assert!(bench.journal.of(Call::Acquire).is_empty());
            assert!(bench.all_held_by(Side::Source));
            assert_next_works(&bench.source, &bench.target);
            assert!(bench.all_held_by(Side::Destination));
        });
    }
}

#[test]
fn acquire_that_fails_gives_back_in_reverse_and_the_source_runs_on() {
    for (failing, held) in [(0, &[][..]), (1, &["disk"]), (2, &["lock", "disk"])] {
        case("acquire fails", || {
            let bench = Bench::new();
            *bench.hooks[failing].1.fails.lock().unwrap() = Some((Call::Acquire, 1));
            let (_, outcome, arrival) = bench.migrate();
            let (error, why) = assert_failed(&outcome, &arrival, &bench.source, &bench.target);
            assert!(matches!(error, sterna::MigrationError::DestinationFailed(1)), "{error}");
            assert_eq!(vm_error(&why).why, "told to fail");
            assert_eq!(bench.journal.of(Call::GiveBack), names(held));
            assert_eq!(bench.journal.of(Call::TakeBack), names(&["net", "lock", "disk"]));
            assert!(bench.all_held_by(Side::Source));
            assert_next_works(&bench.source, &bench.target);
        });
    }
}

#[test]
fn take_back_that_fails_for_a_while_is_tried_again() {
    case("take back fails twice", || {
        let bench = Bench::new();
        *bench.hooks[1].0.fails.lock().unwrap() = Some((Call::TakeBack, 2));
        *bench.hooks[2].1.fails.lock().unwrap() = Some((Call::Acquire, 1));
        let (_, outcome, arrival) = bench.migrate();
        assert_failed(&outcome, &arrival, &bench.source, &bench.target);
        assert_eq!(bench.journal.of(Call::TakeBack), names(&["net", "lock", "lock", "lock", "disk"]));
        assert!(bench.all_held_by(Side::Source));
    });
}

#[test]
fn announce_that_fails_is_a_warning() {
    case("announce fails", || {
        let bench = Bench::new();
        *bench.hooks[0].1.fails.lock().unwrap() = Some((Call::Announce, 1));
        let (_, outcome, arrival) = bench.migrate();
        common::assert_arrived(&outcome, &arrival, &bench.target.guest);
        assert_eq!(bench.journal.of(Call::Announce).len(), 3);
    });
}

#[test]
fn cancel_while_the_guest_is_stopped_takes_hooks_back() {
    case("cancel at device", || {
        let bench = Bench::new();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&bench.target, &params, capabilities);
        let handle = Arc::new(support::Handle::default());
        let observer = {
            let handle = Arc::clone(&handle);
            move |event: &sterna::Event| {
                if matches!(
                    event,
                    sterna::Event::SwitchoverStep { step: sterna::SwitchoverStep::Devices, .. }
                ) {
                    handle.get().cancel().expect("before the commit");
                }
            }
        };
        let to = incoming.address();
        let migration = vm::start(&bench.source, &to, &params, capabilities, Arc::new(observer));
        handle.set(&migration);
        let outcome = migration.wait();
        handle.clear();
        incoming.wait();
        assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
        assert_eq!(bench.journal.of(Call::Release), names(&["disk", "lock", "net"]));
        assert_eq!(bench.journal.of(Call::TakeBack), names(&["net", "lock", "disk"]));
        assert!(bench.all_held_by(Side::Source));
        common::assert_lives_on(&bench.source.guest);
        assert_next_works(&bench.source, &bench.target);
    });
}

#[test]
fn resume_that_fails_holds_the_guest_until_a_retry() {
    case("resume fails", || {
        let bench = Bench::new();
        vm::order(&bench.source.fail_resume, true);
        *bench.hooks[0].1.fails.lock().unwrap() = Some((Call::Acquire, 1));
        let (migration, outcome, _) = bench.migrate();
        assert!(matches!(outcome, Outcome::Failed { held: true, .. }), "{outcome:?}");
        assert!(!migration.may_guest_run());
        assert!(bench.all_held_by(Side::Source));
        assert_eq!(migration.status(), Status::Failed);

        migration.retry().expect("held");
        assert!(matches!(migration.wait(), Outcome::Failed { held: true, .. }), "it still cannot resume");
        vm::order(&bench.source.fail_resume, false);
        migration.retry().expect("held");
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        assert!(migration.may_guest_run());
        migration.retry().expect_err("not held any more");
        common::assert_lives_on(&bench.source.guest);
        assert_next_works(&bench.source, &bench.target);
    });
}

#[test]
fn retry_as_soon_as_the_guest_is_held_has_the_last_word() {
    case("at once", || {
        let bench = Bench::new();
        vm::order(&bench.source.fail_resume, true);
        vm::order(&bench.target.fail_start, true);
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&bench.target, &params, capabilities);
        // The control thread of the first attempt must end first.
        let (go, going) = std::sync::mpsc::channel::<()>();
        let going = std::sync::Mutex::new(going);
        let observer = move |event: &Event| {
            if *event == Event::Status(Status::Failed) {
                let _ = going.lock().unwrap().recv();
            }
        };
        let to = incoming.address();
        let migration = vm::start(&bench.source, &to, &params, capabilities, Arc::new(observer));
        let ram = bench.source.ram();
        eventually("held", || ram.custody() == sterna::ram::Custody::Held);
        vm::order(&bench.source.fail_resume, false);
        let retrying = std::thread::spawn({
            let migration = migration.clone();
            move || migration.retry()
        });
        // Time for the retry to come first. If it comes later, this run proves less.
        std::thread::sleep(std::time::Duration::from_millis(100));
        // From now on no thread is blocked.
        drop(go);
        retrying.join().unwrap().expect("held");
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        assert_eq!(ram.custody(), sterna::ram::Custody::Free);
        incoming.wait();
        common::assert_lives_on(&bench.source.guest);
    });
}

#[test]
fn start_that_fails_gives_back_and_the_source_resumes() {
    case("start fails", || {
        let bench = Bench::new();
        vm::order(&bench.target.fail_start, true);
        let (migration, outcome, arrival) = bench.migrate();
        let (error, why) = assert_failed(&outcome, &arrival, &bench.source, &bench.target);
        assert!(matches!(error, sterna::MigrationError::DestinationFailed(1)), "{error}");
        assert_eq!(vm_error(&why).why, "told to fail");
        assert_eq!(bench.journal.of(Call::GiveBack), names(&["net", "lock", "disk"]));
        assert_eq!(bench.journal.of(Call::TakeBack), names(&["net", "lock", "disk"]));
        assert!(bench.all_held_by(Side::Source));
        assert_eq!(*bench.source.resumes.lock().unwrap(), 1);
        assert_eq!(migration.status(), Status::Failed);
        vm::order(&bench.target.fail_start, false);
        assert_next_works(&bench.source, &bench.target);
        eventually("handed over", || bench.all_held_by(Side::Destination));
    });
}
