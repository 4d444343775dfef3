//! Callbacks that fail, panic, or are overtaken by a cancel.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna::{Incoming, Migration, MigrationError, Outcome, Status, TargetVm, VmError};

use super::{Host, LOOPBACK, as_source, assert_arrives, failed, not_arrived, own, source, start};
use crate::common::{assert_lives_on, multifd};
use crate::support::{TestVm, small};

/// A destination whose callback runs `make`.
fn listen(make: impl FnOnce(&[u8]) -> Result<Arc<dyn TargetVm>, VmError> + Send + 'static) -> Incoming {
    let (params, capabilities) = own();
    let at = LOOPBACK.parse().unwrap();
    Incoming::listen_with(&at, params, capabilities, as_source(), Arc::new(()), make).expect("listening")
}

#[test]
fn error_of_the_callback_reaches_both_operators() {
    let source = source(&small());
    let text = format!("NUMA node 7 is unknown; {}", "ä".repeat(400));
    let incoming = listen(move |_| Err(VmError::new("make the VM", text)));
    let error = failed(&start(&source, &incoming, &multifd(2)), &source);
    let MigrationError::NotConfigured { why } = &error else { panic!("{error}") };
    assert!(why.contains("NUMA node 7 is unknown") && why.ends_with('ä') && why.len() <= 440, "{why}");

    let error = not_arrived(&incoming);
    assert!(matches!(error, MigrationError::Vm(_)) && error.to_string().contains("NUMA node 7"), "{error}");
    assert_eq!(incoming.status(), Status::Failed);
}

#[test]
fn panic_of_the_callback_reaches_both_operators() {
    let source = source(&small());
    let incoming = listen(|_| panic!("no PCI slot is free"));
    let error = failed(&start(&source, &incoming, &own()), &source);
    let MigrationError::NotConfigured { why } = &error else { panic!("{error}") };
    assert!(why.contains("no PCI slot is free") && why.contains("Incoming::listen_with"), "{why}");
    let error = not_arrived(&incoming);
    assert!(matches!(error, MigrationError::Panicked { .. }), "{error}");
}

#[test]
fn machine_that_has_a_guest_already_is_refused_at_both_sides() {
    let source = source(&small());
    let occupied = Arc::new(Host::default());
    let incoming = occupied.wait();
    let other = super::source(&small());
    assert_arrives(&start(&other, &incoming, &own()), &incoming, &occupied);

    let full: Arc<TestVm> = occupied.vm();
    let incoming = listen(move |_| Ok(full));
    let error = failed(&start(&source, &incoming, &own()), &source);
    assert!(error.to_string().contains("a guest has arrived in this VM"), "{error}");
    assert!(not_arrived(&incoming).to_string().contains("a guest has arrived in this VM"));
    assert_lives_on(&occupied.vm().guest);
}

#[test]
fn second_attempt_succeeds_after_a_failed_one() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = listen(|_| Err(VmError::new("make the VM", "not yet")));
    failed(&start(&source, &incoming, &multifd(2)), &source);
    not_arrived(&incoming);
    let at = incoming.address().to_string();
    drop(incoming);
    let incoming = host.wait_at(&at, own(), as_source());
    assert_arrives(&start(&source, &incoming, &multifd(2)), &incoming, &host);
}

/// A migration whose callback runs until the sender is dropped.
struct Making {
    source: Arc<TestVm>,
    host: Arc<Host>,
    incoming: Incoming,
    migration: Migration,
    go: Sender<()>,
}

fn making() -> Making {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let ((begun, has_begun), (go, gone)) = (channel(), channel::<()>());
    let making: (Arc<Host>, Mutex<Receiver<()>>) = (Arc::clone(&host), Mutex::new(gone));
    let incoming = listen(move |configuration| {
        begun.send(()).unwrap();
        let _ = making.1.lock().unwrap().recv();
        making.0.make(configuration)
    });
    let migration = start(&source, &incoming, &multifd(2));
    has_begun.recv_timeout(Duration::from_secs(20)).expect("the callback is called");
    Making { source, host, incoming, migration, go }
}

#[test]
fn source_that_is_cancelled_during_the_callback_keeps_its_guest() {
    let Making { source, host, incoming, migration, go } = making();
    migration.cancel().unwrap();
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    assert!(incoming.arrival().is_none(), "the callback runs");
    drop(go);
    let error = not_arrived(&incoming);
    assert_eq!(error.fault(), None, "{error}");
    assert!(!host.vm().guest.has_guest());
    assert_lives_on(&source.guest);
}

#[test]
fn destination_that_is_cancelled_during_the_callback_ends_at_once() {
    let Making { source, host, incoming, migration, go } = making();
    incoming.cancel().unwrap();
    assert!(matches!(not_arrived(&incoming), MigrationError::Cancelled));
    drop(go);
    let error = failed(&migration, &source);
    assert!(error.to_string().contains("cancelled"), "{error}");
    assert!(!host.vm().guest.has_guest());
    // The VM may wait for another guest.
    let vm: Arc<dyn TargetVm> = host.vm();
    let (params, capabilities) = own();
    let incoming =
        Incoming::listen(vm, &LOOPBACK.parse().unwrap(), params, capabilities, Arc::new(())).unwrap();
    assert_arrives(&start(&source, &incoming, &own()), &incoming, &host);
}

#[test]
fn handle_that_is_dropped_during_the_callback_frees_the_address() {
    let Making { source, host, incoming, migration, go } = making();
    let (at, began) = (incoming.address().to_string(), Instant::now());
    drop(incoming);
    assert!(began.elapsed() < Duration::from_secs(5), "the drop waits for no callback");
    let second = Arc::new(Host::default());
    let incoming = second.wait_at(&at, own(), as_source());
    drop(go);
    failed(&migration, &source);
    assert_arrives(&start(&source, &incoming, &own()), &incoming, &second);
    assert!(!host.vm().guest.has_guest());
}
