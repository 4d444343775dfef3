//! Lost connections that are not replaced: how each side ends.

use super::*;
use crate::common::{assert_lives_on, multifd};
use crate::support::destination::HandMade;
use crate::support::{assert_failed, assert_next_works, eventually, has_warning, small, vms};
use sterna::error::Ending;
use sterna::{Arrival, MigrationError, Outcome, Status};

/// Slow enough for the test to cut it.
fn slow(window: Duration) -> (Parameters, Capabilities) {
    let (params, capabilities) = multifd(2);
    let params = impatient(Parameters { max_bandwidth_bytes: 4 << 20, reconnect_window: window, ..params });
    (params, capabilities)
}

fn cut_for_good(settings: (Parameters, Capabilities)) -> Bench {
    let config = ProcessConfig { working_set_pages: Some(64), ..config() };
    let bench = Bench::new(&config, settings, Box::new(|_, _, _, _| Verdict::Pass));
    eventually("pages", || bench.migration.statistics().normal_pages > 500);
    bench.proxy.refuse(true);
    bench.proxy.cut();
    bench
}

#[test]
fn window_that_ends_leaves_the_guest_at_the_source_and_nothing_at_the_destination() {
    let bench = cut_for_good(slow(Duration::from_millis(500)));
    let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());

    let (ours, theirs) = assert_failed(&outcome, &arrival, &bench.source, &bench.target);
    let MigrationError::NotReconnected { window, .. } = &ours else { panic!("{ours}") };
    assert_eq!(*window, Duration::from_millis(500));
    assert!(matches!(theirs, MigrationError::NotReconnected { .. }), "{theirs}");
    assert_eq!((ours.fault(), theirs.fault()), (None, None));
    assert_next_works(&bench.source, &bench.target);
}

#[test]
fn cancel_while_the_connection_is_lost_ends_both_sides_at_once() {
    let bench = cut_for_good(slow(WINDOW));
    eventually("the loss", || bench.migration.statistics().disconnected.is_some());
    bench.migration.cancel().unwrap();
    bench.proxy.refuse(false);

    assert!(matches!(bench.migration.wait(), Outcome::Cancelled));
    assert_lives_on(&bench.source.guest);
    let began = std::time::Instant::now();
    let Arrival::Failed(why) = bench.incoming.wait() else { panic!("arrived") };
    assert!(began.elapsed() < Duration::from_secs(20), "it need not wait for its source");
    assert!(matches!(why, MigrationError::Ended(Ending::GivenUp)), "{why}");
    assert_next_works(&bench.source, &bench.target);
}

#[test]
fn cancel_while_there_is_a_connection_ends_both_sides_at_once() {
    let (params, capabilities) = slow(WINDOW);
    let bench = Bench::new(&config(), (params, capabilities), Box::new(|_, _, _, _| Verdict::Pass));
    eventually("pages", || bench.migration.statistics().normal_pages > 500);
    bench.migration.cancel().unwrap();

    assert!(matches!(bench.migration.wait(), Outcome::Cancelled));
    let began = std::time::Instant::now();
    assert!(matches!(bench.incoming.wait(), Arrival::Failed(_)));
    assert!(began.elapsed() < Duration::from_secs(20), "it need not wait for its source");
}

#[test]
fn destination_that_gives_up_while_the_connection_is_lost_ends_the_migration() {
    let bench = cut_for_good(slow(WINDOW));
    eventually("the loss", || bench.migration.statistics().disconnected.is_some());
    // The destination may notice the loss before, after, or during the call.
    bench.incoming.cancel().unwrap();
    let arrival = bench.incoming.wait();
    assert!(matches!(arrival, Arrival::Failed(MigrationError::Cancelled)), "{arrival:?}");
    bench.proxy.refuse(false);

    let Outcome::Failed { error, held: false } = bench.migration.wait() else { panic!("completed") };
    let MigrationError::NotReconnected { last, .. } = &error else { panic!("{error:?}") };
    assert_eq!(last.as_deref(), Some("the destination has given the migration up"));
    assert_lives_on(&bench.source.guest);
}

#[test]
fn destination_that_is_gone_is_waited_for_until_the_window_ends() {
    let bench = cut_for_good(slow(Duration::from_millis(800)));
    // Dropping the handles also closes the address.
    let Bench { source, target, proxy, migration, incoming, .. } = bench;
    drop(incoming);
    proxy.refuse(false);

    // Before the end of the migration, because the source still tries to inform the destination.
    eventually("the status", || matches!(migration.status(), Status::Failing | Status::Failed));
    let reason = migration.statistics().error.expect("the reason");
    let Outcome::Failed { error, held: false } = migration.wait() else { panic!("completed") };
    assert!(matches!(error, MigrationError::NotReconnected { .. }), "{error}");
    assert_eq!(reason, error.to_string());
    assert_lives_on(&source.guest);
    crate::support::assert_reset(&target);
}

#[test]
fn qemu_is_refused_with_the_reason_and_a_lost_connection_ends_the_migration() {
    let (source, _) = vms();
    let destination = HandMade::like_qemu();
    let log = Arc::new(Log::default());
    let (params, capabilities) = surviving(multifd(2));
    let migration = vm::start(&source, &destination.address(), &params, capabilities, log.clone());
    assert!(matches!(migration.wait(), Outcome::Completed));
    let told = log.events();
    assert!(has_warning(&told, &["x-sterna-reconnect-window has no effect"]), "{told:?}");
}

#[test]
fn one_side_alone_does_not_wait() {
    for is_source in [true, false] {
        let (with, capabilities) = slow(WINDOW);
        let without = Parameters { reconnect_window: Duration::ZERO, ..with.clone() };
        let (here, there) = if is_source { (&with, &without) } else { (&without, &with) };
        let (source, target) = common::pair(&small());
        let vms = (TestVm::new(source), TestVm::new(target));
        let filter = after_bytes(300_000, (Line::Lane(0), Way::Forward), Verdict::Cut, 1);
        let bench = Bench::between(vms, (here, there), capabilities, filter);

        let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());
        assert_failed(&outcome, &arrival, &bench.source, &bench.target);
        let told = bench.told.events();
        let warned = has_warning(&told, &["set x-sterna-reconnect-window there, too"]);
        assert_eq!(warned, is_source, "{told:?}");
    }
}
