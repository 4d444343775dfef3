//! Adapters, links and hosts fail at any point, with and without lanes: one side has the guest, and no resource is
//! left.

use std::sync::Mutex;

use super::*;
use crate::support::cause;
use sterna::{Decision, Hook, RunState, Status, VmError};
use sterna_transport::rdma::double::{Fault, Trigger};
use sterna_transport::rdma::{CompletionStatus, RdmaError};

const LANES: [u8; 2] = [0, 2];

fn guest(seed: u64) -> ProcessConfig {
    ProcessConfig { blocks: vec![("ram.low".into(), 8 * MIB)], seed, ..writer(5_000) }
}

fn start(lab: &Lab, seed: u64, lanes: u8, change: impl Fn(&mut Parameters)) -> Run {
    let capabilities = Capabilities { multifd: lanes > 0, ..Capabilities::default() };
    lab.start(&guest(seed), capabilities, |params| {
        params.multifd_channels = lanes.max(1);
        change(params);
    })
}

/// The result. If an operator must decide, the test checks the destination first.
fn settle(run: &Run) -> (Outcome, Arrival) {
    loop {
        if let Some(outcome) = run.migration.outcome() {
            // A destination that waits for the next source is cancelled.
            let _ = run.incoming.cancel();
            return (outcome, run.incoming.wait());
        }
        if run.migration.status() == Status::Undecided {
            let decision = match (run.incoming.arrival(), run.incoming.cancel()) {
                (Some(Arrival::Completed(_)), _) => Some(Decision::DestinationRuns),
                (Some(_), _) | (None, Ok(())) => Some(Decision::SourceRuns),
                // The destination has just started the guest.
                (None, Err(_)) => None,
            };
            // The question may have been answered meanwhile.
            decision.map(|decision| run.migration.decide(decision));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn assert_one_has_it(lab: &Lab, run: Run, what: &str) {
    let (outcome, arrival) = settle(&run);
    let is_at = |guest: &ProcessGuest| guest.run_state() == RunState::Running;
    assert_ne!(is_at(&run.source), is_at(&run.target), "{what}: {outcome:?}, {arrival:?}");
    match &outcome {
        Outcome::Completed => assert_arrived(&outcome, &arrival, &run.target),
        Outcome::Failed { held: false, .. } => assert_lives_on(&run.source),
        other => panic!("{what}: {other:?}"),
    }
    drop(run);
    eventually(&format!("{what}: {:?} are left", lab.network.leaks()), || lab.network.leaks().is_empty());
    assert_eq!(lab.network.counts().stale_registrations, 0, "{what}");
}

#[test]
fn fault_anywhere_leaves_one_guest_and_nothing_else() {
    let failed = Fault::Status(CompletionStatus::RetryExceeded);
    for (seed, fault) in [failed, Fault::Kill, Fault::LinkDown, Fault::RemoveDevice].into_iter().enumerate() {
        for at_source in [true, false] {
            for lanes in LANES {
                // Most requests of the source are WRITEs; the destination sends answers.
                for request in if at_source { [4, 60] } else { [2, 8] } {
                    let side = if at_source { "source" } else { "destination" };
                    let what = format!("{fault:?} at request {request} of the {side}, {lanes} lanes");
                    println!("{what}");
                    let lab = Lab::new(Settings::seeded(seed as u64));
                    let host = if at_source { &lab.source_host } else { &lab.destination };
                    lab.network.plan(host, Trigger::Request(request), fault);
                    let run = start(&lab, seed as u64, lanes, |params| {
                        params.limits.setup = Duration::from_secs(1);
                        params.limits.stall = Duration::from_millis(500);
                        params.limits.switchover = Duration::from_secs(1);
                        params.limits.prepare = Duration::from_secs(1);
                        params.limits.acknowledge = Duration::from_millis(500);
                    });
                    assert_one_has_it(&lab, run, &what);
                }
            }
        }
    }
}

#[test]
fn cancel_over_lanes_leaves_nothing() {
    for (seed, after) in [0, 5, 20, 60].into_iter().enumerate() {
        println!("cancelled after {after} ms, seed {seed}");
        let lab = Lab::new(Settings::seeded(seed as u64));
        let run = start(&lab, seed as u64, 4, |params| params.downtime_limit = Duration::ZERO);
        std::thread::sleep(Duration::from_millis(after));
        run.migration.cancel().unwrap();
        assert!(matches!(run.migration.wait(), Outcome::Cancelled));
        let _ = run.incoming.cancel();
        assert!(!matches!(run.incoming.wait(), Arrival::Completed(_)));
        assert_lives_on(&run.source);
        drop(run);
        lab.assert_empty();
    }
}

#[test]
fn link_that_comes_back_while_the_adapter_goes_on_trying_loses_nothing() {
    for lanes in LANES {
        let mut settings = Settings::seeded(41);
        settings.retry_limit = Duration::from_secs(100);
        let lab = Lab::new(settings);
        let run = start(&lab, 41, lanes, |params| params.downtime_limit = Duration::ZERO);
        for host in [&lab.source_host, &lab.destination] {
            let begun = run.migration.statistics().rounds_begun;
            while run.migration.statistics().rounds_begun < begun + 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
            lab.network.set_link(host, false);
            std::thread::sleep(Duration::from_millis(300));
            lab.network.set_link(host, true);
        }

        let (_, run) = run.finish(Duration::ZERO);

        drop(run);
        lab.assert_empty();
    }
}

/// After a failed request, an adapter flushes all queued requests. Their status does not contain the reason.
#[test]
fn link_that_stays_down_does_not_end_with_what_follows_from_it() {
    for at_source in [true, false] {
        for lanes in LANES {
            for seed in 61..=64 {
                let what = format!("link down at the source: {at_source}, {lanes} lanes, seed {seed}");
                println!("{what}");
                let lab = Lab::new(Settings::seeded(seed));
                let run = start(&lab, seed, lanes, |params| params.downtime_limit = Duration::ZERO);
                while run.migration.statistics().rounds_begun < 2 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let host = if at_source { &lab.source_host } else { &lab.destination };
                lab.network.set_link(host, false);

                let outcome = run.migration.wait();

                let _ = run.incoming.cancel();
                run.incoming.wait();
                let Outcome::Failed { error, held: false } = &outcome else { panic!("{what}: {outcome:?}") };
                // Either side may give up first, so the error may be that the destination has closed the connection.
                let is_consequence = matches!(
                    cause(error),
                    Some(RdmaError::Failed { status: CompletionStatus::WorkRequestFlushed, .. })
                );
                assert!(!is_consequence, "{what}: {error}");
                assert_lives_on(&run.source);
                drop(run);
                lab.network.set_link(host, true);
                lab.assert_empty();
            }
        }
    }
}

/// Counts the queue pairs through which the source may write, when all state is loaded and the guest does not run
/// yet.
struct Looks {
    network: Network,
    destination: Host,
    seen: Mutex<Vec<usize>>,
}

impl Hook for Looks {
    fn name(&self) -> String {
        "looks".to_owned()
    }
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.seen.lock().unwrap().push(self.network.writable_queue_pairs(&self.destination));
        Ok(())
    }
}

#[test]
fn no_lane_may_write_any_more_before_the_guest_starts() {
    for (lanes, on_demand_paging) in [(0, false), (1, false), (4, false), (0, true), (4, true)] {
        let mut settings = Settings::seeded(42);
        settings.on_demand_paging = on_demand_paging;
        let lab = Lab::new(settings);
        let run = start(&lab, 42, lanes, |params| params.downtime_limit = Duration::ZERO);
        let (network, destination) = (lab.network.clone(), lab.destination.clone());
        let looks = Arc::new(Looks { network, destination, seen: Mutex::default() });
        run.target.add_hook(looks.clone());
        while run.migration.statistics().rounds_begun < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let writable = lab.network.writable_queue_pairs(&lab.destination);
        assert!(writable > usize::from(lanes), "{writable} with {lanes} lanes while pages move");

        let (_, run) = run.finish(Duration::ZERO);

        assert_eq!(*looks.seen.lock().unwrap(), [0], "{lanes} lanes");
        drop((run, looks));
        lab.assert_empty();
    }
}
