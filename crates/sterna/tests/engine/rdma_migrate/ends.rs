//! After every kind of end, one side may run the guest, and no resource is left.

use super::*;
use sterna_transport::rdma::double::{Fault, Trigger};

fn assert_stayed(run: Run, outcome: &Outcome) {
    assert!(matches!(outcome, Outcome::Cancelled | Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert_lives_on(&run.source);
    run.incoming.cancel().ok();
    let arrival = run.incoming.wait();
    assert!(!matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
}

#[test]
fn cancel_while_pages_move_leaves_nothing() {
    for (seed, after) in [0, 3, 10, 30, 80, 200].into_iter().enumerate() {
        println!("cancelled after {after} ms, seed {seed}");
        let lab = Lab::new(Settings::seeded(seed as u64));
        let run = lab.start(&writer(20_000), Capabilities::default(), |params| {
            params.downtime_limit = Duration::ZERO;
        });
        std::thread::sleep(Duration::from_millis(after));
        run.migration.cancel().unwrap();
        let outcome = run.migration.wait();
        assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
        assert_stayed(run, &outcome);
        lab.assert_empty();
    }
}

/// If the WRITEs of one lane occupy all memory that may be registered, the other lanes wait for it. They have nothing
/// in flight, so no failure of their own ends the wait.
#[test]
fn cancel_ends_lanes_that_wait_for_memory_of_other_lanes() {
    let lab = Lab::new(Settings::new());
    // With pin-all, the source requests no memory later.
    let capabilities = Capabilities { multifd: true, rdma_pin_all: true, ..Capabilities::default() };
    let run = lab.start(&pinned::guest(24, 29), capabilities, |params| {
        let fabric = params.rdma.fabric.as_ref();
        let is_source = fabric.is_some_and(|fabric| Arc::ptr_eq(fabric, &lab.source));
        params.multifd_channels = 4;
        params.rdma.pinned_limit_bytes = is_source.then_some(2 * MIB);
        // The first round takes seconds.
        params.max_bandwidth_bytes = 6 * MIB;
    });
    let written = || run.migration.statistics().rdma.is_some_and(|rdma| rdma.writes > 0);
    eventually("a WRITE", written);
    // From here on no WRITE completes, so no memory is released.
    lab.network.hold();

    run.migration.cancel().unwrap();

    eventually("the source has ended", || run.migration.outcome().is_some());
    lab.network.resume();
    let outcome = run.migration.wait();
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    assert_stayed(run, &outcome);
    lab.assert_empty();
}

#[test]
fn request_that_fails_while_pages_move_ends_the_migration_and_leaves_nothing() {
    use sterna_transport::rdma::CompletionStatus::{RemoteOperation, RetryExceeded};
    for (seed, status) in [RemoteOperation, RetryExceeded].into_iter().enumerate() {
        for request in [20, 60, 150] {
            println!("{status:?} in place of request {request}");
            let lab = Lab::new(Settings::seeded(seed as u64));
            lab.network.plan(&lab.source_host, Trigger::Request(request), Fault::Status(status));
            let run = lab.start(&writer(20_000), Capabilities::default(), |params| {
                params.downtime_limit = Duration::ZERO;
            });
            let outcome = run.migration.wait();
            assert_stayed(run, &outcome);
            lab.assert_empty();
        }
    }
}
