//! Conformance cases: establishing, refusing and ending connections.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::setup::{Buffer, LONG, QUEUES, SHORT, complete, send};
use super::{Case, Setup};
use crate::CancelFlag;
use crate::rdma::{
    Access, CompletionStatus, ConnectParameters, Connection, Event, PRIVATE_DATA, Queue, RdmaError,
    RejectReason, Request, Wake,
};

pub(super) const CASES: &[Case] = &[
    ("private data arrives both ways", private_data),
    ("private data that is too long is refused at the sender", private_data_too_long),
    ("a port without a listener rejects", nobody_listens),
    ("a reject carries private data", reject),
    ("a request that is dropped is rejected", dropped_request),
    ("a receive posted before connecting takes the first message", early_receive),
    ("the peer sees a disconnect after all that was sent", disconnect),
    ("destroying ends waits, and the peer sees a disconnect", destroy),
    ("accepting and connecting end by limit and by flag", limits),
    ("connecting to loopback names the addresses that have a device", loopback),
];

fn private_data(setup: &Setup) {
    let listener = setup.listen();
    let source = setup.dial(&*listener);
    let flag = CancelFlag::new();
    let asked: Vec<u8> = (1..=PRIVATE_DATA.request as u8).collect();
    for (asked, replied) in [(&asked[..], [7; 196].as_slice()), (b"\0\0\0\x01\0\0\0\0", b"short")] {
        let source = if asked.len() == 8 { setup.dial(&*listener) } else { source.clone() };
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let request = listener.accept(Some(LONG), &flag).expect("a request");
                let got = request.private_data().to_vec();
                let connection = request.open(&QUEUES).expect("a queue pair");
                connection.establish(&ConnectParameters::accept(replied), LONG, &flag).expect("accepting");
                (got, connection)
            });
            let reply =
                source.establish(&ConnectParameters::connect(asked), LONG, &flag).expect("connecting");
            assert_eq!((reply.len(), &reply[..replied.len()]), (PRIVATE_DATA.reply, replied));
            let (got, _connection) = accepted.join().expect("the accepting side");
            assert_eq!((got.len(), &got[..asked.len()]), (PRIVATE_DATA.request, asked));
        });
    }
}

fn private_data_too_long(setup: &Setup) {
    let listener = setup.listen();
    let flag = CancelFlag::new();
    let refused = setup.dial(&*listener).establish(&ConnectParameters::connect(&[1; 57]), LONG, &flag);
    assert!(matches!(refused, Err(RdmaError::PrivateData { len: 57, limit: 56, .. })), "{refused:?}");

    for is_reject in [true, false] {
        let source = setup.dial(&*listener);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| source.establish(&ConnectParameters::connect(b""), LONG, &flag));
            let request = listener.accept(Some(LONG), &flag).expect("a request");
            let refused = if is_reject {
                request.reject(&[1; 149]).err()
            } else {
                let connection = request.open(&QUEUES).expect("a queue pair");
                connection.establish(&ConnectParameters::accept(&[1; 197]), LONG, &flag).err()
            };
            assert!(matches!(refused, Some(RdmaError::PrivateData { .. })), "{refused:?}");
            assert!(asking.join().expect("the asking side").is_err(), "the request is rejected");
        });
    }
}

fn nobody_listens(setup: &Setup) {
    let port = setup.listen().local_address().port();
    let route = setup.source.resolve(SocketAddr::new(setup.address, port), LONG, &CancelFlag::new());
    let source = route.expect("resolving").open(&QUEUES).expect("a queue pair");

    let refused = source.establish(&ConnectParameters::connect(b""), LONG, &CancelFlag::new());

    assert!(
        matches!(refused, Err(RdmaError::Rejected { reason: RejectReason::NO_LISTENER, .. })),
        "{refused:?}"
    );
}

fn reject(setup: &Setup) {
    let said = [9; 148];

    let refused = refused_by(setup, |request| request.reject(&said).expect("rejecting"));

    let RdmaError::Rejected { reason: RejectReason::BY_PEER, private_data, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(private_data, said);
}

fn dropped_request(setup: &Setup) {
    let refused = refused_by(setup, drop);

    assert!(matches!(refused, RdmaError::Rejected { reason: RejectReason::BY_PEER, .. }), "{refused}");
}

/// The source's error when the destination does `act` with its request.
fn refused_by(setup: &Setup, act: impl FnOnce(Box<dyn Request>)) -> RdmaError {
    let listener = setup.listen();
    let source = setup.dial(&*listener);
    let flag = CancelFlag::new();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| source.establish(&ConnectParameters::connect(b""), LONG, &flag));
        act(listener.accept(Some(LONG), &flag).expect("a request"));
        asking.join().expect("the asking side").expect_err("a refusal")
    })
}

fn early_receive(setup: &Setup) {
    let listener = setup.listen();
    let source = setup.dial(&*listener);
    let into = Buffer::of(&*source.adapter(), 4096, Access::RECEIVE);
    source.post_receive(3, into.piece(0, 4096)).expect("a receive");
    let flag = CancelFlag::new();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let request = listener.accept(Some(LONG), &flag).expect("a request");
            let connection = request.open(&QUEUES).expect("a queue pair");
            let from = Buffer::filled(&*connection.adapter(), 4096);
            connection.establish(&ConnectParameters::accept(b""), LONG, &flag).expect("accepting");
            connection.post_send(&[send(1, from.piece(0, 16))]).expect("posting");
            assert_eq!(complete(&*connection, Queue::Send).status, CompletionStatus::Success);
            connection
        });
        source.establish(&ConnectParameters::connect(b""), LONG, &flag).expect("connecting");
        assert_eq!(complete(&*source, Queue::Receive).bytes, 16);
        sending.join().expect("the sending side");
    });
}

fn disconnect(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);
    for id in 0..3 {
        joined.destination.post_receive(id, into.piece(0, 64)).expect("a receive");
    }
    for id in 0..2 {
        joined.source.post_send(&[send(id, from.piece(0, 16))]).expect("posting");
        assert_eq!(complete(&*joined.source, Queue::Send).status, CompletionStatus::Success);
    }

    joined.source.disconnect();

    for id in 0..2 {
        let received = complete(&*joined.destination, Queue::Receive);
        assert_eq!((received.id, received.status), (id, CompletionStatus::Success));
    }
    // The remaining receive is flushed before the end is reported.
    let left = complete(&*joined.destination, Queue::Receive);
    assert_eq!((left.id, left.status), (2, CompletionStatus::WorkRequestFlushed));
    assert_eq!(woken(&*joined.destination, LONG), Wake::Ended);
    assert_eq!(joined.destination.end(), Some(Event::Disconnected));
    assert_eq!(joined.source.end(), Some(Event::Disconnected));
}

fn destroy(setup: &Setup) {
    let joined = setup.join();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            joined.source.wait(Queue::Receive, Instant::now().checked_add(LONG), &CancelFlag::new())
        });
        std::thread::sleep(Duration::from_millis(20));
        joined.source.destroy();
        let woken = waiting.join().expect("the waiting side");
        // The wait may find the disconnect before the queue pair is destroyed.
        assert!(matches!(woken, Ok(Wake::Ended) | Err(RdmaError::Ended { event: None, .. })), "{woken:?}");
    });

    assert_eq!(woken(&*joined.destination, LONG), Wake::Ended);
    let later = joined.source.wait(Queue::Send, None, &CancelFlag::new());
    assert!(matches!(later, Err(RdmaError::Ended { .. })), "{later:?}");
    assert!(joined.source.end().is_some());
    joined.source.destroy();
}

fn woken(connection: &dyn Connection, limit: Duration) -> Wake {
    connection.wait(Queue::Receive, Instant::now().checked_add(limit), &CancelFlag::new()).expect("waiting")
}

fn limits(setup: &Setup) {
    let listener = setup.listen();
    let flag = CancelFlag::new();
    let nobody_came = listener.accept(Some(SHORT), &flag).map(|_| ());
    assert!(matches!(nobody_came, Err(RdmaError::TimedOut { .. })), "{nobody_came:?}");

    // The listener does not answer.
    let asked = setup.dial(&*listener).establish(&ConnectParameters::connect(b""), SHORT, &flag);
    assert!(matches!(asked, Err(RdmaError::TimedOut { .. })), "{asked:?}");

    let connected = setup.join();
    std::thread::scope(|scope| {
        let source = setup.dial(&*listener);
        let (listener, flag, destination) = (&listener, &flag, &connected.destination);
        let asking = scope.spawn(move || source.establish(&ConnectParameters::connect(b""), LONG, flag));
        let waiting = scope.spawn(move || destination.wait(Queue::Receive, None, flag));
        std::thread::sleep(Duration::from_millis(50));
        flag.cancel();
        let asked = asking.join().expect("the asking side");
        assert!(matches!(asked, Err(RdmaError::Cancelled { .. })), "{asked:?}");
        assert_eq!(waiting.join().expect("the waiting side").expect("waiting"), Wake::Cancelled);
        let accepted = listener.accept(Some(LONG), flag).map(|_| ());
        assert!(matches!(accepted, Err(RdmaError::Cancelled { .. })), "{accepted:?}");
    });

    listener.close();
    let closed = listener.accept(None, &CancelFlag::new()).map(|_| ());
    assert!(matches!(closed, Err(RdmaError::Cancelled { .. })), "{closed:?}");
}

fn loopback(setup: &Setup) {
    let to = SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), 4444);

    let refused = setup.source.resolve(to, LONG, &CancelFlag::new()).map(|_| ());

    let Err(RdmaError::NoDevice { having, .. }) = refused else { panic!("{refused:?}") };
    assert!(!having.is_empty());
}
