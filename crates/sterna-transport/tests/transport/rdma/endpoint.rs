//! Endpoints: messages and writes over a queue pair, also when the queue pair fails.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::CancelFlag;
use sterna_transport::rdma::double::{Fault, Settings, Trigger};
use sterna_transport::rdma::{
    Access, CompletionStatus, ConnectParameters, Endpoint, EndpointSizes, Event, Fabric, RdmaError,
    Registration, Write,
};

use super::{LONG, Lab, MIB, address, block, registered};

const SIZES: EndpointSizes = EndpointSizes::messages(4096, 4, 2).with_writes(8);

/// Both ends of a connection, with one receive posted at each.
fn joined(lab: &Lab) -> (Endpoint, Endpoint) {
    let flag = CancelFlag::new();
    let listener = lab.destination.listen((address(2), 0).into(), 4).unwrap();
    let route = lab.source.resolve(listener.local_address(), LONG, &flag).unwrap();
    let source = Endpoint::new(route.open(&SIZES.attributes()).unwrap(), &SIZES).unwrap();
    source.post_receives(1).unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(Some(LONG), &flag).unwrap();
            let destination =
                Endpoint::new(request.open(&SIZES.attributes().with_remote_write()).unwrap(), &SIZES)
                    .unwrap();
            destination.post_receives(1).unwrap();
            let accept = ConnectParameters::accept(b"");
            destination.connection().establish(&accept, LONG, &flag).unwrap();
            destination
        });
        source.connection().establish(&ConnectParameters::connect(b""), LONG, &flag).unwrap();
        (source, accepted.join().unwrap())
    })
}

/// Registered memory of the two sides: the source and the target of writes.
fn memory(source: &Endpoint, destination: &Endpoint) -> (Registration, Registration) {
    let from = registered(&*source.connection().adapter(), &block(MIB), Access::SOURCE);
    let to = registered(&*destination.connection().adapter(), &block(MIB), Access::REMOTE_WRITE);
    from.memory().slice().copy_from(&(0..MIB).map(|at| (at % 250) as u8 + 1).collect::<Vec<_>>()).unwrap();
    (from, to)
}

fn page(from: &Registration, to: &Registration, at: usize) -> Write {
    let (from, address) = (from.piece(at * 4096, 4096).unwrap(), to.memory().address() + at as u64 * 4096);
    Write { from, address, rkey: to.rkey() }
}

#[test]
fn messages_arrive_whole_and_in_turn() {
    for settings in [Settings::new(), Settings::seeded(3)] {
        let lab = Lab::new(settings);
        let (source, destination) = joined(&lab);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..200u32 {
                    // The receive for the next message is posted before the answer, which permits the peer to send it.
                    let message = source.receive(Some(LONG)).unwrap().unwrap();
                    assert_eq!(message, number.to_ne_bytes());
                    source.post_receives(1).unwrap();
                    source.send(&[b"for ", &message, &vec![7; number as usize]], Some(LONG)).unwrap();
                }
            });
            for number in 0..200u32 {
                destination.send(&[&number.to_ne_bytes()], Some(LONG)).unwrap();
                let message = destination.receive(Some(LONG)).unwrap().unwrap();
                destination.post_receives(1).unwrap();
                assert_eq!(message.len(), 8 + number as usize);
                assert_eq!(message[4..8], number.to_ne_bytes());
            }
        });
        assert_eq!(lab.network.counts().rnrs, 0);
        drop((source, destination));
        assert_eq!(lab.network.leaks(), Vec::<String>::new());
    }
}

#[test]
fn writes_are_there_before_the_message_behind_them_and_in_flight_until_complete() {
    let lab = Lab::new(Settings::seeded(5));
    let (source, destination) = joined(&lab);
    let (from, to) = memory(&source, &destination);

    lab.network.hold();
    source.write(&[page(&from, &to, 0), page(&from, &to, 1)], Some(LONG)).unwrap();
    assert_eq!(source.bytes_in_flight(), 8192);
    lab.network.resume();
    // More writes than may be in flight at the same time.
    let writes: Vec<Write> = (0..MIB / 4096).map(|at| page(&from, &to, at)).collect();
    source.write(&writes, Some(LONG)).unwrap();
    source.send(&[b"done"], Some(LONG)).unwrap();

    assert_eq!(destination.receive(Some(LONG)).unwrap().unwrap(), b"done");
    let copies = [&from, &to].map(|side| {
        let mut bytes = vec![0; MIB];
        side.memory().slice().copy_to(&mut bytes).unwrap();
        bytes
    });
    assert_eq!(copies[0], copies[1]);
    source.flush(Some(LONG)).unwrap();
    assert_eq!(source.bytes_in_flight(), 0);
    assert_eq!(lab.network.counts().writes, 2 + 256);
}

#[test]
fn failed_write_names_its_address_and_every_later_call_fails() {
    let lab = Lab::new(Settings::new());
    let (source, destination) = joined(&lab);
    let (from, to) = memory(&source, &destination);
    let wrong = Write { rkey: to.rkey() + 1, ..page(&from, &to, 3) };

    source.write(&[page(&from, &to, 0), wrong, page(&from, &to, 4)], Some(LONG)).unwrap();
    let error = source.flush(Some(LONG)).unwrap_err();

    let RdmaError::Failed { operation: "a write", status, remote_address, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((status, remote_address), (CompletionStatus::RemoteAccess, Some(wrong.address)));
    for later in [source.write(&[wrong], None), source.send(&[b"x"], None), source.reap()] {
        assert!(matches!(later, Err(RdmaError::Failed { .. })), "{later:?}");
    }
    // The disconnect reports the failure to the peer, if nothing else did.
    source.shutdown();
    let received = destination.receive(Some(LONG)).unwrap_err();
    assert!(received.is_end(), "{received}");
}

#[test]
fn link_that_stays_down_is_named_by_whoever_waits() {
    for at_source in [true, false] {
        let lab = Lab::new(Settings::new());
        let (source, destination) = joined(&lab);
        let (from, to) = memory(&source, &destination);
        source.post_receives(1).unwrap();
        lab.network.set_link(if at_source { &lab.source } else { &lab.destination }, false);
        source.write(&[page(&from, &to, 0)], None).unwrap();

        // The failed write flushes the receive, so both calls must return the write's error.
        for error in [source.receive(Some(LONG)).unwrap_err(), source.flush(Some(LONG)).unwrap_err()] {
            let is_named = match &error {
                RdmaError::Ended { event, .. } => at_source && *event == Some(Event::PortDown),
                RdmaError::Failed { status, .. } => !at_source && *status == CompletionStatus::RetryExceeded,
                _ => false,
            };
            assert!(is_named && error.is_end(), "{error}");
        }
    }
}

#[test]
fn message_without_a_receive_fails() {
    let lab = Lab::new(Settings::new());
    let (source, _destination) = joined(&lab);

    source.send(&[b"one"], Some(LONG)).unwrap();
    source.send(&[b"two"], Some(LONG)).unwrap();
    let error = source.flush(Some(LONG)).unwrap_err();

    assert!(matches!(error, RdmaError::Failed { status: CompletionStatus::RnrRetryExceeded, .. }), "{error}");
    assert_eq!(lab.network.counts_of(&lab.source).rnrs, 1);
}

#[test]
fn buffers_are_not_posted_twice() {
    let lab = Lab::new(Settings::new());
    let (source, _destination) = joined(&lab);

    source.post_receives(3).unwrap();

    assert!(matches!(source.post_receives(1), Err(RdmaError::QueueFull { queue: "receive", .. })));
    assert!(matches!(source.send(&[&[0; 4097]], None), Err(RdmaError::MessageTooLong { len: 4097, .. })));
}

#[test]
fn waits_end_by_limit_shutdown_and_the_peers_end() {
    let lab = Lab::new(Settings::new());
    let (source, destination) = joined(&lab);
    let (from, to) = memory(&source, &destination);
    assert!(source.receive(Some(Duration::from_millis(20))).unwrap().is_none());

    lab.network.hold();
    source.write(&[page(&from, &to, 0)], None).unwrap();
    let slow = source.flush(Some(Duration::from_millis(20))).unwrap_err();
    assert!(matches!(slow, RdmaError::TimedOut { .. }), "{slow}");
    let source = Arc::new(source);
    std::thread::scope(|scope| {
        let waiting = [scope.spawn(|| source.flush(None)), scope.spawn(|| source.receive(None).map(|_| ()))];
        std::thread::sleep(Duration::from_millis(20));
        source.shutdown();
        for ended in waiting.map(|thread| thread.join().unwrap()) {
            // Two outcomes are possible, by which is noticed first: the cancel flag, or the flushed receive.
            assert!(matches!(ended, Err(RdmaError::Cancelled { .. } | RdmaError::Ended { .. })), "{ended:?}");
        }
    });

    let ended = destination.receive(None).unwrap_err();
    assert!(matches!(ended, RdmaError::Ended { event: Some(_), .. }), "{ended}");
}

#[test]
fn peer_that_dies_ends_everything() {
    for request in 1..12 {
        let lab = Lab::new(Settings::seeded(request));
        let (source, destination) = joined(&lab);
        let (from, to) = memory(&source, &destination);
        lab.network.plan(&lab.source, Trigger::Request(request), Fault::Kill);

        let writes: Vec<Write> = (0..16).map(|at| page(&from, &to, at)).collect();
        let written = source.write(&writes, Some(LONG)).and_then(|()| source.flush(Some(LONG)));

        assert!(written.is_err());
        let ended = destination.receive(None).unwrap_err();
        assert!(matches!(ended, RdmaError::Ended { .. }), "{ended}");
        drop((source, destination, from, to));
        assert_eq!(lab.network.leaks(), Vec::<String>::new());
    }
}
