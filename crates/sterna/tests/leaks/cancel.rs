//! Cancelling, pausing and throttling from any thread at any time.

use crate::common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{self, Handle, TestVm, assert_next_works, assert_reset, case, vm, vms};
use sterna::{Capabilities, Event, Migration, Outcome, Parameters, SourceVm, Status};

/// Cancels, from within the observer, at the first event that `at` accepts.
struct CancelAt {
    migration: Handle,
    at: Box<dyn Fn(&Event) -> bool + Send + Sync>,
    result: Mutex<Option<Result<(), String>>>,
}

impl CancelAt {
    fn new(at: impl Fn(&Event) -> bool + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { migration: Handle::default(), at: Box::new(at), result: Mutex::default() })
    }

    fn observer(self: &Arc<Self>) -> Arc<dyn sterna::Observer> {
        let this = Arc::clone(self);
        Arc::new(move |event: &Event| {
            if this.result.lock().unwrap().is_none() && (this.at)(event) {
                let result = this.migration.get().cancel().map_err(|refusal| refusal.to_string());
                *this.result.lock().unwrap() = Some(result);
            }
        })
    }
}

/// The event without its numbers.
fn kind(event: &Event) -> String {
    match event {
        Event::SwitchoverStep { step, .. } => format!("{step:?}"),
        Event::Warning(_) => "Warning".to_owned(),
        other => format!("{other:?}"),
    }
}

fn settings(channels: u8) -> (Parameters, Capabilities) {
    let (params, mut capabilities) = common::multifd(channels.max(1));
    capabilities.multifd = channels > 0;
    (params, capabilities)
}

/// Migrates with `observer`; returns the results of both ends.
fn run(
    source: &Arc<TestVm>,
    target: &Arc<TestVm>,
    channels: u8,
    cancel: &Arc<CancelAt>,
) -> (Outcome, sterna::Arrival) {
    let (params, capabilities) = settings(channels);
    let incoming = vm::listen(target, &params, capabilities);
    let migration = vm::start(source, &incoming.address(), &params, capabilities, cancel.observer());
    cancel.migration.set(&migration);
    let ends = (migration.wait(), support::ended(&incoming));
    cancel.migration.clear();
    ends
}

fn assert_cancelled(outcome: &Outcome, source: &TestVm, target: &TestVm) {
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    common::assert_lives_on(&source.guest);
    assert_reset(target);
}

/// The kinds of events of a complete migration, in the order in which they first occur.
fn kinds(channels: u8) -> Vec<String> {
    let (source, target) = vms();
    let seen = Arc::new(Mutex::new(Vec::<String>::new()));
    let log = Arc::clone(&seen);
    let cancel = CancelAt::new(move |event| {
        let mut seen = log.lock().unwrap();
        let kind = kind(event);
        if !seen.contains(&kind) {
            seen.push(kind);
        }
        false
    });
    let (outcome, arrival) = run(&source, &target, channels, &cancel);
    common::assert_arrived(&outcome, &arrival, &target.guest);
    let mut kinds = seen.lock().unwrap().clone();
    // The number of rounds varies.
    kinds.retain(|kind| !kind.starts_with("Round(") || kind == "Round(1)" || kind == "Round(2)");
    kinds
}

#[test]
fn second_migration_of_a_guest_is_refused_until_the_first_has_ended() {
    case("twice", || {
        let (source, target) = vms();
        let mut params = common::parameters();
        params.max_bandwidth_bytes = 1 << 20;
        let capabilities = Capabilities::default();
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let vm: Arc<dyn sterna::SourceVm> = Arc::clone(&source) as _;
        let again =
            Migration::start(vm, &incoming.address(), params.clone(), capabilities, Arc::new(())).map(drop);
        assert!(matches!(again, Err(sterna::StartError::Guest(_))), "{again:?}");
        migration.cancel().expect("cancelling");
        migration.wait();
        support::ended(&incoming);
        assert_next_works(&source, &target);
    });
}

#[test]
fn cancel_at_each_event_leaves_the_guest_or_is_refused() {
    for channels in [0, 2] {
        let kinds = case("a whole migration", || kinds(channels));
        let commit = kinds.iter().position(|kind| kind == "Prepared").expect("prepared");
        for needed in ["Status(Setup)", "Status(Active)", "Status(Device)", "Stopped", "Round(1)", "Devices"]
        {
            assert!(kinds.iter().position(|kind| kind == needed).unwrap() < commit, "{kinds:?}");
        }
        for (index, at) in kinds.iter().enumerate() {
            case(at, || {
                let (source, target) = vms();
                let wanted = at.clone();
                let cancel = CancelAt::new(move |event| kind(event) == wanted);
                let (outcome, arrival) = run(&source, &target, channels, &cancel);
                let result = cancel.result.lock().unwrap().clone().expect("the event came");
                if index < commit {
                    assert_eq!(result, Ok(()), "{at}");
                    assert_cancelled(&outcome, &source, &target);
                    assert_next_works(&source, &target);
                } else {
                    assert!(result.is_err(), "{at}");
                    common::assert_arrived(&outcome, &arrival, &target.guest);
                }
            });
        }
    }
}

#[test]
fn cancel_at_random_moments_leaves_one_guest() {
    let mut seed = sterna_testing::random("cancel_at_random_moments_leaves_one_guest");
    let (mut cancelled, mut completed) = (0, 0);
    for round in 0..40 {
        case(&format!("random cancel {round}"), || {
            let (source, target) = vms();
            let (params, capabilities) = settings(seed.u64(..4) as u8);
            let incoming = vm::listen(&target, &params, capabilities);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            let other = migration.clone();
            let pause = Duration::from_micros(seed.u64(..25_000));
            let canceller = std::thread::Builder::new().name("canceller".into()).spawn(move || {
                std::thread::sleep(pause);
                other.cancel().is_ok()
            });
            let accepted = canceller.unwrap().join().unwrap();
            let (outcome, arrival) = (migration.wait(), incoming_end(&migration, &incoming));
            if accepted {
                cancelled += 1;
                assert_cancelled(&outcome, &source, &target);
                assert_next_works(&source, &target);
            } else {
                completed += 1;
                common::assert_arrived(&outcome, &arrival.expect("arrived"), &target.guest);
            }
        });
    }
    // Prints whether cancels hit both sides of the commit; which side each hits depends on timing.
    #[allow(clippy::print_stderr)]
    {
        eprintln!("{cancelled} cancelled, {completed} completed");
    }
}

/// Ends a destination that a cancelled source never reached, because it would wait for another source.
fn incoming_end(migration: &Migration, incoming: &sterna::Incoming) -> Option<sterna::Arrival> {
    if matches!(migration.outcome(), Some(Outcome::Cancelled)) {
        let _ = incoming.cancel();
    }
    Some(incoming.wait())
}

#[test]
fn pause_before_switchover_waits_for_continue_or_cancel() {
    for continues in [true, false] {
        case("pause before switchover", || {
            let (source, target) = vms();
            let (params, mut capabilities) = settings(2);
            capabilities.pause_before_switchover = true;
            let incoming = vm::listen(&target, &params, capabilities);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            assert!(migration.continue_switchover().is_err() || migration.status() == Status::PreSwitchover);
            support::until_status(&migration, Status::PreSwitchover);
            assert_eq!(source.run_state(), sterna::RunState::Paused);
            assert!(!migration.may_guest_run());
            if continues {
                migration.continue_switchover().expect("continuing");
                common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
                assert!(migration.continue_switchover().is_err());
            } else {
                migration.cancel().expect("cancelling");
                let outcome = migration.wait();
                support::ended(&incoming);
                assert_cancelled(&outcome, &source, &target);
                assert!(migration.may_guest_run());
                assert_next_works(&source, &target);
            }
        });
    }
}

#[test]
fn bandwidth_limit_holds_and_can_be_lifted_while_it_holds() {
    case("throttled", || {
        let (source, target) = vms();
        let (mut params, capabilities) = settings(2);
        params.max_bandwidth_bytes = 1 << 20;
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let began = Instant::now();
        support::eventually("bytes", || migration.statistics().transferred_bytes > 300_000);
        let stats = migration.statistics();
        // Each lane may exceed the limit by one packet, and sends less afterwards.
        let allowed = (began.elapsed().as_secs_f64() + 0.2) * f64::from(1 << 20) + 2.0 * 600_000.0;
        assert!(stats.transferred_bytes as f64 <= allowed, "{} > {allowed}", stats.transferred_bytes);
        assert_eq!(migration.status(), Status::Active);
        migration.set_live(|live| live.max_bandwidth_bytes = 0).expect("a live setting");
        let outcome = migration.wait();
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
        let stats = migration.statistics();
        assert!(stats.rounds.iter().any(|round| !round.lanes.throttled.is_zero()), "{:?}", stats.rounds);
    });
}

#[test]
fn cancel_frees_lanes_that_the_bandwidth_limit_holds() {
    case("throttled to nothing", || {
        let (source, target) = vms();
        let (mut params, capabilities) = settings(3);
        params.max_bandwidth_bytes = 1;
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        support::until_status(&migration, Status::Active);
        migration.cancel().expect("cancelling");
        let outcome = migration.wait();
        support::ended(&incoming);
        assert_cancelled(&outcome, &source, &target);
        migration.cancel().expect_err("over");
        assert_next_works(&source, &target);
    });
}

#[test]
fn incoming_given_up_before_and_while_a_guest_comes() {
    case("given up", || {
        let (source, target) = vms();
        let (mut params, capabilities) = settings(2);
        let idle = vm::listen(&target, &params, capabilities);
        idle.cancel().expect("giving up");
        assert!(matches!(idle.wait(), sterna::Arrival::Failed(_)));
        params.max_bandwidth_bytes = 1 << 20;
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        support::eventually("pages", || incoming.statistics().received_bytes > 100_000);
        incoming.cancel().expect("giving up");
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        support::assert_failed(&outcome, &arrival, &source, &target);
        assert_next_works(&source, &target);
    });
}

#[test]
fn completed_status_comes_with_its_downtime() {
    case("downtime", || {
        let (source, target) = vms();
        let (params, capabilities) = settings(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let downtime = Arc::new(Mutex::new(None));
        let handle = Arc::new(Handle::default());
        let observer = {
            let (downtime, handle) = (Arc::clone(&downtime), Arc::clone(&handle));
            move |event: &Event| {
                if *event == Event::Status(Status::Completed) {
                    *downtime.lock().unwrap() = handle.get().statistics().downtime;
                }
            }
        };
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(observer));
        handle.set(&migration);
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        assert!(downtime.lock().unwrap().is_some(), "a monitor that asks on the event gets no downtime");
        handle.clear();
    });
}
