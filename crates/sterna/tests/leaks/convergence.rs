//! A guest that dirties memory faster than it can be sent: it is throttled until it converges, or the operator learns
//! why it does not. The throttle is always removed at the end.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Log, assert_lives_on, multifd, trace};
use crate::support::vm::{FREE_RATE, TestVm, listen, start};
use crate::support::{self, case};
use sterna::error::Remedy;
use sterna::{
    Capabilities, Event, Migration, MigrationError, NonConvergence, Outcome, Parameters, SettingsError,
    StartError, Status,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_guests::{Fill, Pattern};

/// A guest with 8 MiB, dirtied five times as fast as `max-bandwidth` allows to send. The downtime limit fits only a
/// tenth of it.
pub fn hopeless() -> (Arc<TestVm>, Arc<TestVm>, Parameters, Capabilities) {
    trace();
    let config = ProcessConfig {
        blocks: vec![("ram".into(), 8 << 20)],
        tracking: Tracking::Software,
        pattern: Pattern::Random,
        fill: Fill::Random(1),
        rate: FREE_RATE,
        workers: 1,
        ..ProcessConfig::default()
    };
    let source = ProcessGuest::boot(config.clone()).expect("source");
    let target = ProcessGuest::waiting(config).expect("destination");
    source.cont().expect("the guest starts");
    let (mut params, capabilities) = multifd(2);
    params.max_bandwidth_bytes = 16 << 20;
    params.avail_switchover_bandwidth_bytes = 16 << 20;
    params.downtime_limit = Duration::from_millis(50);
    (TestVm::new(source), TestVm::new(target), params, capabilities)
}

#[test]
fn guest_that_does_not_converge_fails_when_that_is_wanted_and_runs_on() {
    case("guest that does not converge fails when that is wanted and runs on", || {
        let (source, target, mut params, capabilities) = hopeless();
        params.non_convergence = NonConvergence::Fail;
        let incoming = listen(&target, &params, capabilities);

        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));

        let Outcome::Failed { error: MigrationError::NotConverging { why }, held: false } = migration.wait()
        else {
            panic!("{:?}", migration.outcome());
        };
        assert!(why.dirtied_bytes_per_second > 0 && why.sendable_bytes_per_second > 0, "{why}");
        assert_eq!(why.downtime_limit, params.downtime_limit);
        assert!(why.downtime > why.downtime_limit, "{why}");
        assert!(why.remedies.contains(&Remedy::AutoConverge), "{why}");
        assert!(source.throttled.lock().unwrap().is_empty(), "nobody asked for throttling");
        assert_lives_on(&source.guest);
    });
}

#[test]
fn guest_that_does_not_converge_goes_on_with_one_warning_by_default() {
    case("guest that does not converge goes on with one warning by default", || {
        let (source, target, params, capabilities) = hopeless();
        let incoming = listen(&target, &params, capabilities);
        let log = Arc::new(Log::default());

        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::clone(&log) as _);

        let warnings = || {
            let is_warning = |event: &Event| matches!(event, Event::Warning(text) if text.starts_with("the migration does not converge"));
            log.events().iter().filter(|event| is_warning(event)).count()
        };
        while warnings() == 0 {
            assert!(migration.outcome().is_none(), "{:?}", migration.outcome());
            std::thread::sleep(Duration::from_millis(20));
        }
        migration.set_live(|params| params.downtime_limit = Duration::from_secs(10)).expect("a live setting");
        assert!(matches!(migration.wait(), Outcome::Completed));
        assert_eq!(warnings(), 1);
        assert_lives_on(&target.guest);
    });
}

#[test]
fn guest_that_does_not_converge_is_stopped_for_longer_than_the_limit_when_that_is_wanted() {
    case("guest that does not converge is stopped for longer than the limit when that is wanted", || {
        let (source, target, mut params, capabilities) = hopeless();
        params.non_convergence = NonConvergence::Switchover;
        let incoming = listen(&target, &params, capabilities);
        let log = Arc::new(Log::default());

        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::clone(&log) as _);

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        let is_warning = |event: &Event| matches!(event, Event::Warning(text) if text.starts_with("the migration does not converge"));
        assert_eq!(log.events().iter().filter(|event| is_warning(event)).count(), 1);
        assert_lives_on(&target.guest);
    });
}

#[test]
fn auto_converge_slows_the_guest_down_until_it_converges_and_lets_go_of_it() {
    case("auto converge slows the guest down until it converges and lets go of it", || {
        let (source, target, params, mut capabilities) = hopeless();
        capabilities.auto_converge = true;
        let incoming = listen(&target, &params, capabilities);

        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        let throttled = source.throttled.lock().unwrap().clone();
        assert_eq!(throttled.first(), Some(&20), "{throttled:?}");
        assert_eq!(throttled.last(), Some(&0), "{throttled:?}");
        let steps = &throttled[..throttled.len() - 1];
        assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "{throttled:?}");
        assert_eq!(migration.statistics().cpu_throttle_percent, 0);
        assert_lives_on(&target.guest);
    });
}

#[test]
fn cancel_of_a_throttled_migration_lets_go_of_the_guest() {
    case("cancel of a throttled migration lets go of the guest", || {
        let (source, target, params, mut capabilities) = hopeless();
        capabilities.auto_converge = true;
        let incoming = listen(&target, &params, capabilities);
        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        while migration.statistics().cpu_throttle_percent == 0 {
            assert!(migration.outcome().is_none(), "{:?}", migration.outcome());
            std::thread::sleep(Duration::from_millis(5));
        }

        migration.cancel().expect("it has not committed");

        assert!(matches!(migration.wait(), Outcome::Cancelled));
        assert_eq!(source.throttled.lock().unwrap().last(), Some(&0));
        assert_lives_on(&source.guest);
    });
}

/// A `vcpu-dirty-limit` that no vCPU reaches.
const LOOSE: u64 = 1 << 30;
/// A `vcpu-dirty-limit` with which the guest converges.
const TIGHT: u64 = 1 << 20;

/// Starts [`hopeless`] with two vCPUs that already have the limits `before`, and with `dirty-limit` at `limit`.
fn limited(before: [Option<u64>; 2], limit: u64) -> (Arc<TestVm>, Arc<TestVm>, Migration, sterna::Incoming) {
    let (source, target, mut params, mut capabilities) = hopeless();
    *source.dirty_limits.lock().unwrap() = before.to_vec();
    capabilities.dirty_limit = true;
    params.vcpu_dirty_limit_bytes = limit;
    let incoming = listen(&target, &params, capabilities);
    let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
    (source, target, migration, incoming)
}

fn until_limited(migration: &Migration) {
    while !migration.statistics().is_dirty_limited {
        assert!(migration.outcome().is_none(), "{:?}", migration.outcome());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn dirty_limit_holds_the_guest_until_it_converges_and_lets_go_of_it() {
    case("dirty limit holds the guest until it converges and lets go of it", || {
        let (source, target, migration, _incoming) = limited([None, None], TIGHT);

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());

        let limited = source.limited.lock().unwrap().clone();
        assert_eq!(limited.first(), Some(&(None, Some(TIGHT))), "{limited:?}");
        assert_eq!(*source.dirty_limits.lock().unwrap(), [None, None], "{limited:?}");
        assert!(!migration.statistics().is_dirty_limited);
        assert_lives_on(&target.guest);
    });
}

#[test]
fn dirty_limit_leaves_an_operators_own_limits_as_they_were_and_never_above_them() {
    case("dirty limit leaves an operator's own limits as they were and never above them", || {
        let own = [Some(TIGHT / 2), None];
        let (source, target, migration, _incoming) = limited(own, TIGHT);

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());

        let limited = source.limited.lock().unwrap().clone();
        assert_eq!(limited[..2], [(Some(0), own[0]), (Some(1), Some(TIGHT))], "{limited:?}");
        assert_eq!(*source.dirty_limits.lock().unwrap(), own, "{limited:?}");
        assert_lives_on(&target.guest);
    });
}

#[test]
fn cancel_of_a_limited_migration_gives_every_vcpu_back_what_it_had() {
    case("cancel of a limited migration gives every vCPU back what it had", || {
        let own = [None, Some(2 * LOOSE)];
        let (source, _target, migration, _incoming) = limited(own, LOOSE);
        until_limited(&migration);

        migration.cancel().expect("it has not committed");

        assert!(matches!(migration.wait(), Outcome::Cancelled));
        let limited = source.limited.lock().unwrap().clone();
        assert_eq!(limited[..2], [(Some(0), Some(LOOSE)), (Some(1), Some(LOOSE))], "{limited:?}");
        assert_eq!(*source.dirty_limits.lock().unwrap(), own, "{limited:?}");
        assert_lives_on(&source.guest);
    });
}

#[test]
fn dirty_limit_that_is_changed_meanwhile_reaches_the_vcpus_and_is_let_go_of() {
    case("dirty limit that is changed meanwhile reaches the vCPUs and is let go of", || {
        let own = [None, Some(2 * LOOSE)];
        let (source, target, migration, _incoming) = limited(own, LOOSE);
        until_limited(&migration);

        migration.set_live(|params| params.vcpu_dirty_limit_bytes = TIGHT).expect("a live setting");

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        let limited = source.limited.lock().unwrap().clone();
        assert!(limited.contains(&(Some(0), Some(TIGHT))), "{limited:?}");
        assert!(limited.contains(&(Some(1), Some(TIGHT))), "{limited:?}");
        assert_eq!(*source.dirty_limits.lock().unwrap(), own, "{limited:?}");
        assert_lives_on(&target.guest);
    });
}

#[test]
fn guest_is_not_stopped_because_bursts_under_max_bandwidth_go_fast() {
    case("guest is not stopped because bursts under max-bandwidth go fast", || {
        let (source, target, mut params, capabilities) = hopeless();
        params.avail_switchover_bandwidth_bytes = 0;
        params.non_convergence = NonConvergence::Fail;
        let incoming = listen(&target, &params, capabilities);

        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));

        let Outcome::Failed { error: MigrationError::NotConverging { why }, .. } = migration.wait() else {
            panic!("{:?}", migration.outcome());
        };
        assert!(why.is_bandwidth_limited, "{why}");
        assert_eq!(why.sendable_bytes_per_second, params.max_bandwidth_bytes);
        assert!(why.remedies.contains(&Remedy::RaiseBandwidthLimit), "{why}");
        assert_lives_on(&source.guest);
    });
}

#[test]
fn failing_that_is_wanted_only_after_the_warning_ends_it_too() {
    case("failing that is wanted only after the warning ends it too", || {
        let (source, target, params, capabilities) = hopeless();
        let incoming = listen(&target, &params, capabilities);
        let log = Arc::new(Log::default());
        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::clone(&log) as _);
        while !support::has_warning(&log.events(), &["converge"]) {
            assert!(migration.outcome().is_none(), "{:?}", migration.outcome());
            std::thread::sleep(Duration::from_millis(20));
        }

        migration.set_live(|params| params.non_convergence = NonConvergence::Fail).expect("a live setting");

        let outcome = migration.wait();
        let Outcome::Failed { error: MigrationError::NotConverging { .. }, held: false } = outcome else {
            panic!("{outcome:?}");
        };
        assert_lives_on(&source.guest);
    });
}

#[test]
fn lanes_are_idle_no_longer_than_a_round_lasts_however_long_an_operator_waits() {
    case("lanes are idle no longer than a round lasts however long an operator waits", || {
        let (source, target, mut params, mut capabilities) = hopeless();
        params.max_bandwidth_bytes = 0;
        params.downtime_limit = Duration::from_secs(10);
        capabilities.pause_before_switchover = true;
        let incoming = listen(&target, &params, capabilities);
        let migration = start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        support::until_status(&migration, Status::PreSwitchover);
        std::thread::sleep(Duration::from_millis(300));

        migration.continue_switchover().expect("it waits for that");

        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        for round in &migration.statistics().rounds {
            assert!(round.lanes.idle <= round.took, "{round:?}");
        }
    });
}

#[test]
fn throttling_that_is_not_there_is_refused_before_anything_begins() {
    case("throttling that is not there is refused before anything begins", || {
        let (source, target, params, capabilities) = hopeless();
        let incoming = listen(&target, &params, capabilities);
        let refused = |capabilities: Capabilities| {
            let vm: Arc<dyn sterna::SourceVm> = Arc::clone(&source) as _;
            let started =
                sterna::Migration::start(vm, &incoming.address(), params.clone(), capabilities, Arc::new(()));
            match started {
                Err(StartError::Settings(why)) => why,
                other => panic!("{:?}", other.err()),
            }
        };

        let both = refused(Capabilities { auto_converge: true, dirty_limit: true, ..capabilities });
        assert_eq!(both, SettingsError::TwoThrottles);
        let no_ring = refused(Capabilities { dirty_limit: true, ..capabilities });
        assert_eq!(no_ring, SettingsError::NoDirtyLimit);
    });
}
