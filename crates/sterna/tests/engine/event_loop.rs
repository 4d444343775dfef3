//! A VMM with an event loop: it waits for a limited time, or for a descriptor.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::common::{self, Log};
use crate::support::{PATIENCE, eventually};
use sterna::ram::Custody;
use sterna::{Capabilities, Event, EventFd, Incoming, Outcome, Parameters, Status, TargetVm, Vm, Waited};

/// Whether the descriptor becomes readable within `limit`.
fn is_readable(fd: &EventFd, limit: Duration) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut fds, Some(&limit)).unwrap() == 1
}

#[test]
fn descriptors_become_readable_at_each_event_and_at_the_end() {
    let (source, target) = common::pair(&common::config());
    let logs = [Arc::new(Log::default()), Arc::new(Log::default())];
    let (params, capabilities) = common::multifd(2);
    let waiting: Arc<dyn TargetVm> = Arc::clone(&target) as _;
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(waiting, &at, params.clone(), capabilities, logs[1].clone()).unwrap();
    let there = incoming.event_fd().unwrap();
    assert_eq!(there.clear().unwrap(), 1, "it is readable at first");
    assert!(!is_readable(&there, Duration::ZERO), "nothing has happened");
    let migration = common::start(&source, &incoming.address(), &params, capabilities, logs[0].clone());
    let here = migration.event_fd().unwrap();
    let (mut count, mut outcome) = (0, None);
    while outcome.is_none() {
        assert!(is_readable(&here, PATIENCE), "no event: {:?}", migration.status());
        count += here.clear().unwrap();
        outcome = migration.outcome();
    }
    let mut arrival = incoming.arrival();
    while arrival.is_none() {
        assert!(is_readable(&there, PATIENCE), "no event: {:?}", incoming.status());
        there.clear().unwrap();
        arrival = incoming.arrival();
    }
    common::assert_arrived(&outcome.unwrap(), &arrival.unwrap(), &target);
    assert!(logs[0].events().contains(&Event::Status(Status::Completed)));
    assert!(count > 2, "{count} events");
    // A descriptor that is made after the end is readable.
    assert!(is_readable(&migration.event_fd().unwrap(), Duration::ZERO));
    assert!(here.as_fd().try_clone_to_owned().is_ok());
}

#[test]
fn wait_with_a_limit_ends_at_the_limit_and_at_the_end() {
    let (source, target) = common::pair(&common::config());
    let slow = Parameters { max_bandwidth_bytes: 1 << 20, ..common::parameters() };
    let incoming = common::listen(&target, &slow, Capabilities::default());
    let migration = common::start(&source, &incoming.address(), &slow, Capabilities::default(), Arc::new(()));
    assert!(matches!(migration.wait_timeout(Duration::from_millis(20)), Waited::TimedOut));
    assert!(incoming.wait_timeout(Duration::from_millis(20)).is_none());
    migration.set_live(|params| params.max_bandwidth_bytes = 0).unwrap();
    let waited = migration.wait_timeout(Duration::MAX);
    let Waited::Ended(outcome) = waited else { panic!("{waited:?}") };
    let arrival = incoming.wait_timeout(PATIENCE).expect("it has ended");
    common::assert_arrived(&outcome, &arrival, &target);
}

#[test]
fn destination_that_settles_frees_its_port_and_its_memory_is_free_for_the_next_migration() {
    let (source, target) = common::pair(&common::config());
    let (params, capabilities) = common::multifd(2);
    let incoming = common::listen(&target, &params, capabilities);
    let at = incoming.address();
    let migration = common::start(&source, &at, &params, capabilities, Arc::new(()));
    let arrival = incoming.settle(Duration::ZERO);
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    common::assert_arrived(&outcome, &arrival, &target);
    drop(sterna_transport::Listener::bind(&at).expect("the port is free"));
    eventually("custody", || target.ram().custody() == Custody::Arrived);
    // Only this test and the machine hold the VM: no thread of the migration does.
    drop(migration);
    let strong = Arc::strong_count(&target);
    assert_eq!(strong, 1, "the engine still holds the VM");
}
