//! A panic of a VMM's callback is an error of that callback: the migration ends, and the guest runs at its previous
//! side with its hooks. The destination gives everything back, and the next migration succeeds.

use crate::common;

use std::sync::Arc;

use crate::support::bank::Bank;
use crate::support::hook::{Call, Journal, Lease, LeaseHook, Side};
use crate::support::trapped::{Bomb, Trapped};
use crate::support::{
    TestVm, assert_next_works, assert_reset, case, eventually, has_warning, short, small, vm,
};
use sterna::ram::Custody;
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, MigrationError, Outcome, Parameters, SourceVm,
    Status, TargetVm, Vm,
};

struct Bench {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    hooks: [Arc<LeaseHook>; 2],
    lease: Arc<Lease>,
}

impl Bench {
    fn new(capabilities: Capabilities) -> Self {
        let calls = Arc::default();
        let bank = Bank::new(0, 7, 300_000, 100_000, &calls);
        // Without multifd, no part of a stream is read before the guest stops.
        let bank = if capabilities.multifd { bank.read_while_running() } else { bank };
        let theirs = Arc::new(bank.waiting(&Arc::default()));
        let (source, target) = common::pair(&small());
        let (source, target) =
            (TestVm::with_banks(source, vec![Arc::new(bank)]), TestVm::with_banks(target, vec![theirs]));
        let (ours, theirs, lease) = LeaseHook::pair("disk", &Arc::new(Journal::default()));
        source.guest.add_hook(Arc::clone(&ours) as _);
        target.guest.add_hook(Arc::clone(&theirs) as _);
        Self { source, target, hooks: [ours, theirs], lease }
    }

    /// Migrates with the bomb on both sides, and waits for the end.
    fn migrate(
        &self,
        bomb: &Arc<Bomb>,
        (params, capabilities): &(Parameters, Capabilities),
        watched: Watched,
    ) -> (Migration, Outcome, Arrival) {
        let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let (source, target) = (Trapped::source(&self.source, bomb), Trapped::target(&self.target, bomb));
        let nobody = || Arc::new(()) as Arc<dyn sterna::Observer>;
        let [ours, theirs] = match watched {
            Watched::No => [nobody(), nobody()],
            Watched::Source => [Arc::clone(bomb) as _, nobody()],
            Watched::Destination => [nobody(), Arc::clone(bomb) as _],
        };
        let target: Arc<dyn TargetVm> = target;
        let incoming =
            Incoming::listen(target, &any, params.clone(), *capabilities, theirs).expect("listening");
        let source: Arc<dyn SourceVm> = source;
        let migration = Migration::start(source, &incoming.address(), params.clone(), *capabilities, ours)
            .expect("started");
        eventually("the end at the source", || migration.outcome().is_some());
        eventually("the end at the destination", || {
            // If not all channels of this migration have arrived, the destination waits for the next one.
            if incoming.status() == Status::Setup {
                let _ = incoming.cancel();
            }
            incoming.arrival().is_some()
        });
        let ends = (migration.wait(), incoming.wait());
        (migration, ends.0, ends.1)
    }

    /// Asserts that the guest runs here as before, with its lock, and that a further migration succeeds.
    fn assert_as_before(&self) {
        assert_eq!(self.source.ram().custody(), Custody::Free);
        assert_eq!(self.lease.holder(), Some(Side::Source));
        assert!(self.source.banks[0].runs(), "its device stands still");
        common::assert_lives_on(&self.source.guest);
        assert_reset(&self.target);
        assert_next_works(&self.source, &self.target);
        assert_eq!(self.lease.holder(), Some(Side::Destination));
    }
}

#[derive(Clone, Copy)]
enum Watched {
    No,
    Source,
    Destination,
}

fn settings() -> [(Parameters, Capabilities); 2] {
    [(common::parameters(), Capabilities::default()), common::multifd(2)]
}

/// Asserts that the error names this callback and its message, and that its fault is local.
fn assert_names(error: &MigrationError, callback: &str) {
    let MigrationError::Panicked { callback: named, message } = error else { panic!("{callback}: {error}") };
    let name = callback.trim_end_matches(", done");
    assert!(message.contains(&format!("told to panic in {name}")), "{callback}: {error}");
    // The rest of the name is the device or hook. Callbacks that return lists have no such part.
    let is_listing = name.ends_with("::devices") || name.ends_with("::hooks");
    assert!(named.contains(name) || is_listing, "{callback}: {error}");
    assert_eq!(error.fault(), Some(sterna::Fault::Local));
}

fn fails(callbacks: &[&str], at: Side) {
    for settings in settings() {
        for callback in callbacks {
            case(callback, || {
                let bench = Bench::new(settings.1);
                let bomb = Bomb::new(Some(callback));
                let (_, outcome, arrival) = bench.migrate(&bomb, &settings, Watched::No);
                assert!(!bomb.is_armed(), "{callback} was never called: {outcome:?}, {arrival:?}");
                let Outcome::Failed { error: ours, held: false } = outcome else {
                    panic!("{callback}: {outcome:?}")
                };
                let Arrival::Failed(theirs) = arrival else { panic!("{callback}: {arrival:?}") };
                assert_names(if at == Side::Source { &ours } else { &theirs }, callback);
                bench.assert_as_before();
            });
        }
    }
}

#[test]
fn callback_of_the_source_that_panics_fails_the_migration() {
    fails(
        &[
            "SourceVm::stop",
            "SourceVm::stop, done",
            "source Vm::devices",
            "source Vm::hooks",
            "Device::save",
            "DirtySource::start",
            "DirtySource::sync",
            "DirtySource::rearm",
            "DirtySource::mark_absent",
            "Hook::release",
            "Hook::release, done",
        ],
        Side::Source,
    );
}

#[test]
fn stream_of_the_source_that_panics_fails_the_migration() {
    fails(
        &[
            "begin to save",
            "ask what is remaining",
            "expected_bytes_per_second",
            "read",
            "read, done",
            "quiesce",
            "stop",
            "stop, done",
            "read its configuration",
        ],
        Side::Source,
    );
}

#[test]
fn callback_of_the_destination_that_panics_fails_the_migration() {
    fails(
        &[
            "Device::load",
            "destination Vm::hooks",
            "Hook::acquire",
            "Hook::acquire, done",
            "TargetVm::start",
            "begin to load",
            "load",
            "load, done",
            "finish loading",
            "run",
        ],
        Side::Destination,
    );
}

#[test]
fn callback_that_panics_while_all_is_undone_keeps_nothing_from_being_undone() {
    for settings in settings() {
        for callback in [
            "Hook::take_back",
            "Hook::take_back, done",
            "Hook::give_back, done",
            "DirtySource::stop, done",
            "TargetVm::reset, done",
            "end saving, done",
            "forget what was loaded, done",
            "run",
        ] {
            case(callback, || {
                let bench = Bench::new(settings.1);
                // The call of `run` is the source's, after the failed handover.
                *bench.hooks[1].fails.lock().unwrap() = Some((Call::Acquire, 1));
                if callback == "Hook::give_back, done" {
                    *bench.hooks[1].fails.lock().unwrap() = None;
                    vm::order(&bench.target.fail_start, true);
                }
                let bomb = Bomb::new(Some(callback));
                let (_, outcome, arrival) = bench.migrate(&bomb, &settings, Watched::No);
                assert!(!bomb.is_armed(), "{callback} was never called: {outcome:?}, {arrival:?}");
                assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{callback}: {outcome:?}");
                assert!(matches!(arrival, Arrival::Failed(_)), "{callback}: {arrival:?}");
                vm::order(&bench.target.fail_start, false);
                if callback == "run" {
                    // The operator gets a warning: the guest continues to run without this device.
                    sterna::DeviceStream::run(bench.source.banks[0].as_ref()).unwrap();
                }
                bench.assert_as_before();
            });
        }
    }
}

#[test]
fn guest_that_cannot_be_brought_back_for_a_panic_is_held_until_a_retry() {
    case("resume", || {
        let bench = Bench::new(common::multifd(2).1);
        *bench.hooks[1].fails.lock().unwrap() = Some((Call::Acquire, 1));
        let bomb = Bomb::new(Some("SourceVm::resume"));
        let (migration, outcome, _) = bench.migrate(&bomb, &common::multifd(2), Watched::No);
        assert!(matches!(outcome, Outcome::Failed { held: true, .. }), "{outcome:?}");
        assert!(!migration.may_guest_run());
        assert_eq!(bench.source.ram().custody(), Custody::Held);

        // No thread can be created. No state has changed, and a retry is possible.
        sterna::refuse_threads(Some("migration"));
        let refused = migration.retry().expect_err("without a thread");
        sterna::refuse_threads(None);
        assert!(matches!(refused, sterna::RetryError::System(_)), "{refused}");
        assert!(matches!(migration.outcome(), Some(Outcome::Failed { held: true, .. })));
        // The thread begins and dies before its first step, as by a panic of `Parameters::on_thread_start`.
        sterna::refuse_threads(Some("migration, begun"));
        let refused = migration.retry().expect_err("its thread died");
        sterna::refuse_threads(None);
        assert!(matches!(refused, sterna::RetryError::System(_)), "{refused}");
        assert_eq!(bench.source.ram().custody(), Custody::Held);
        assert!(matches!(migration.outcome(), Some(Outcome::Failed { held: true, .. })));
        migration.retry().expect("held");
        eventually("the end of the retry", || migration.outcome().is_some());
        assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
        bench.assert_as_before();
    });
}

#[test]
fn lock_that_a_panicking_destination_keeps_holds_the_guest() {
    case("give back", || {
        let bench = Bench::new(Capabilities::default());
        vm::order(&bench.target.fail_start, true);
        let bomb = Bomb::new(Some("Hook::give_back"));
        let mut settings = (common::parameters(), Capabilities::default());
        settings.0.limits.prepare = std::time::Duration::from_secs(2);
        let (migration, outcome, arrival) = bench.migrate(&bomb, &settings, Watched::No);
        assert!(matches!(outcome, Outcome::Failed { held: true, .. }), "{outcome:?}");
        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
        assert_eq!(bench.source.run_state(), sterna::RunState::Paused);
        assert_reset(&bench.target);
        sterna::Hook::give_back(bench.hooks[1].as_ref());
        migration.retry().expect("held");
        assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
        vm::order(&bench.target.fail_start, false);
        bench.assert_as_before();
    });
}

/// A hook that never gives its resource back.
struct Sticky;

impl sterna::Hook for Sticky {
    fn name(&self) -> String {
        "sticky".into()
    }
    fn release(&self) -> Result<(), sterna::VmError> {
        Ok(())
    }
    fn take_back(&self) -> Result<(), sterna::VmError> {
        Ok(())
    }
    fn acquire(&self) -> Result<(), sterna::VmError> {
        panic!("told to take and panic")
    }
    fn give_back(&self) {
        panic!("told to keep it")
    }
}

#[test]
fn lock_that_is_kept_by_a_panic_in_taking_it_is_told_of() {
    case("sticky", || {
        let (source, target) = crate::support::vms();
        target.guest.add_hook(Arc::new(Sticky));
        let log = Arc::new(common::Log::default());
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen_told(&target, &params, capabilities, Arc::clone(&log) as _);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        let told = log.events();
        assert!(has_warning(&told, &["told to keep it"]), "{told:?}");
        assert!(has_warning(&told, &["hooks could not be released"]), "{told:?}");
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn panic_that_comes_too_late_to_matter_changes_nothing() {
    for settings in settings() {
        for (callback, watched) in [
            ("Hook::announce", Watched::No),
            ("DirtySource::stop, done", Watched::No),
            ("end saving, done", Watched::No),
            ("Observer::event", Watched::Source),
            ("Observer::event", Watched::Destination),
        ] {
            case(callback, || {
                let bench = Bench::new(settings.1);
                let bomb = Bomb::new(Some(callback));
                let (_, outcome, arrival) = bench.migrate(&bomb, &settings, watched);
                assert!(!bomb.is_armed(), "{callback} was never called");
                common::assert_arrived(&outcome, &arrival, &bench.target.guest);
                assert_eq!(bench.lease.holder(), Some(Side::Destination));
            });
        }
    }
}

#[test]
fn observer_that_panics_at_every_event_does_not_end_a_migration() {
    case("observers", || {
        let (source, target) = common::pair(&small());
        let (source, target) = (TestVm::new(source), TestVm::new(target));
        let log = Arc::new(common::Log::default());
        let told = Arc::clone(&log);
        let observer = move |event: &sterna::Event| {
            sterna::Observer::event(told.as_ref(), event);
            panic!("told to");
        };
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(observer));
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &target.guest);
        let said = log.events();
        assert!(has_warning(&said, &["Observer::event panicked: told to"]), "{said:?}");
    });
}

#[test]
fn throttle_that_panics_fails_the_migration_and_is_let_go_of() {
    for callback in ["Throttle::set_cpu_throttle", "Throttle::set_cpu_throttle 0"] {
        case(callback, || {
            let bomb = Bomb::new(Some(callback));
            let (source, target, params, mut capabilities) = super::convergence::hopeless();
            capabilities.auto_converge = true;
            let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
            let place: Arc<dyn TargetVm> = Trapped::target(&target, &bomb);
            let incoming =
                Incoming::listen(place, &any, params.clone(), capabilities, Arc::new(())).expect("listening");
            let guest: Arc<dyn SourceVm> = Trapped::source(&source, &bomb);
            let migration = Migration::start(guest, &incoming.address(), params, capabilities, Arc::new(()))
                .expect("started");
            eventually("throttled", || !source.throttled.lock().unwrap().is_empty());
            if callback.ends_with('0') {
                migration.cancel().expect("before the commit");
            }
            eventually("the end", || migration.outcome().is_some() && incoming.arrival().is_some());
            assert!(!bomb.is_armed(), "{callback} was never called");
            match migration.wait() {
                Outcome::Failed { error, held: false } => assert_names(&error, callback),
                outcome => assert!(matches!(outcome, Outcome::Cancelled) && callback.ends_with('0')),
            }
            assert_eq!(source.throttled.lock().unwrap().last(), Some(&0), "it is throttled still");
            drop(incoming);
            common::assert_lives_on(&source.guest);
            assert_reset(&target);
            assert_next_works(&source, &target);
        });
    }
}

#[test]
fn cancel_ends_a_migration_whose_callback_panicked() {
    case("cancel", || {
        let bench = Bench::new(common::multifd(2).1);
        let bomb = Bomb::new(Some("DirtySource::sync"));
        let (migration, outcome, _) = bench.migrate(&bomb, &common::multifd(2), Watched::No);
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        migration.cancel().expect_err("it is over");
        bench.assert_as_before();
    });
}

#[test]
fn greeting_that_panics_turns_that_connection_away() {
    for callback in ["destination Vm::uuid", "destination Vm::devices"] {
        case(callback, || {
            let bench = Bench::new(common::multifd(2).1);
            let bomb = Bomb::new(Some(callback));
            let (params, capabilities) = common::multifd(2);
            let params = Parameters { limits: short().limits, ..params };
            let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
            let target: Arc<dyn TargetVm> = Trapped::target(&bench.target, &bomb);
            let incoming = Incoming::listen(target, &any, params.clone(), capabilities, Arc::new(()))
                .expect("listening");
            let source: Arc<dyn SourceVm> = Arc::clone(&bench.source) as _;
            let migration = Migration::start(source, &incoming.address(), params, capabilities, Arc::new(()))
                .expect("started");
            eventually("the end at the source", || migration.outcome().is_some());
            assert!(!bomb.is_armed());
            assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
            assert!(incoming.arrival().is_none(), "it waits for a source whose channels all come");
            incoming.cancel().expect("nothing has begun");
            drop(incoming);
            bench.assert_as_before();
        });
    }
}

#[test]
fn thread_that_is_not_to_be_had_fails_the_migration() {
    for name in ["lane 1", "save bank", "return path", "load bank", "loader"] {
        case(name, || {
            let bench = Bench::new(common::multifd(2).1);
            sterna::refuse_threads(Some(name));
            let (_, outcome, arrival) = bench.migrate(&Bomb::new(None), &common::multifd(2), Watched::No);
            sterna::refuse_threads(None);
            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{name}: {outcome:?}");
            assert!(matches!(arrival, Arrival::Failed(_)), "{name}: {arrival:?}");
            bench.assert_as_before();
        });
    }
    case("control threads", || {
        let bench = Bench::new(common::multifd(2).1);
        let (params, capabilities) = common::multifd(2);
        for name in ["incoming", "listener", "migration"] {
            sterna::refuse_threads(Some(name));
            let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
            let target: Arc<dyn TargetVm> = Arc::clone(&bench.target) as _;
            let source: Arc<dyn SourceVm> = Arc::clone(&bench.source) as _;
            let is_refused = match name {
                "migration" => {
                    Migration::start(source, &any, params.clone(), capabilities, Arc::new(())).is_err()
                }
                _ => Incoming::listen(target, &any, params.clone(), capabilities, Arc::new(())).is_err(),
            };
            sterna::refuse_threads(None);
            assert!(is_refused, "{name}");
        }
        assert_eq!(bench.source.ram().custody(), Custody::Free);
        bench.assert_as_before();
    });
}
