//! A guest that writes faster than it can be sent: it is slowed down until it converges, or the operator hears why it does
//! not, and it never stays slowed down.

mod common;
mod support;

use std::sync::Arc;
use std::time::Duration;

use common::{Log, assert_lives_on, multifd, trace};
use sterna::{Capabilities, Event, MigrationError, NonConvergence, Outcome, Parameters, StartError};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_guests::{Fill, Pattern};
use support::case;
use support::vm::{FREE_RATE, TestVm, listen, start};

/// 8 MiB, rewritten five times as fast as `max-bandwidth` sends it, and a pause that only a tenth of it fits.
fn hopeless() -> (Arc<TestVm>, Arc<TestVm>, Parameters, Capabilities) {
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
        for part in ["MB/s", "downtime-limit allows 50 ms", "auto-converge"] {
            assert!(why.contains(part), "{why}");
        }
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
        migration.set_live(|params| params.downtime_limit = Duration::from_secs(10));
        assert!(matches!(migration.wait(), Outcome::Completed));
        assert_eq!(warnings(), 1);
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
        assert_eq!(both, "dirty-limit conflicts with auto-converge: switch one of them off");
        let no_ring = refused(Capabilities { dirty_limit: true, ..capabilities });
        assert!(no_ring.contains("dirty ring"), "{no_ring}");
    });
}
