//! Tests of the binding with the mock libraries. It passes the conformance cases, and uses no destroyed object.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::CancelFlag;
use crate::rdma::conformance::{self, Setup};
use crate::rdma::verbs::VerbsFabric;
use crate::rdma::{
    Access, CompletionStatus, ConnectParameters, Connection, Fabric, Listener, Memory, Operation, Queue,
    QueuePairAttributes, RdmaError, Registration, SendRequest,
};

const LONG: Duration = Duration::from_secs(60);
const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 1));
const ATTRIBUTES: QueuePairAttributes = QueuePairAttributes::new(8, 8);

fn fabric() -> Arc<VerbsFabric> {
    Arc::new(VerbsFabric::over(&LIBRARY))
}

/// Cases that the mocks cannot run. They need devices in sysfs, time limits, or pinned pages.
const OTHERS: [&str; 4] = [
    "connecting to loopback names the addresses that have a device",
    "registering populates a hole",
    "writes to discarded pages are lost",
    "nothing is written after the right was taken away under fire",
];

#[test]
fn binding_conforms_over_the_strictest_libraries() {
    for (name, case) in conformance::cases().filter(|(name, _)| !OTHERS.contains(name)) {
        let setup = Setup::new(fabric(), fabric(), fabric(), ADDRESS);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&setup)));
        assert!(ran.is_ok(), "{name:?}");
    }
}

/// A connection of this process with itself.
struct Joined {
    source: Arc<dyn Connection>,
    destination: Arc<dyn Connection>,
    _listener: Arc<dyn Listener>,
    /// Port of the listener.
    port: u16,
}

fn listen() -> (Arc<dyn Listener>, SocketAddr) {
    let listener = fabric().listen(SocketAddr::new(ADDRESS, 0), 4).expect("listening");
    let at = SocketAddr::new(ADDRESS, listener.local_address().port());
    (listener, at)
}

fn join() -> Joined {
    let (listener, at) = listen();
    let flag = CancelFlag::new();
    let source =
        fabric().resolve(at, LONG, &flag).expect("resolving").open(&ATTRIBUTES).expect("a queue pair");
    let destination = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(Some(LONG), &flag).expect("a request");
            let connection = request.open(&ATTRIBUTES).expect("a queue pair");
            connection.establish(&ConnectParameters::accept(b""), LONG, &flag).expect("accepting");
            connection
        });
        source.establish(&ConnectParameters::connect(b""), LONG, &flag).expect("connecting");
        accepted.join().expect("the accepting side")
    });
    Joined { source, destination, _listener: listener, port: at.port() }
}

/// Waits until a thread has read the identifier's queue pair inside the library.
fn until_inside(id: usize) {
    let until = Instant::now() + LONG;
    while world().held_up.contains(&id) {
        assert!(Instant::now() < until, "no thread uses the queue pair");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One thread uses the queue pair inside the library while another destroys it.
#[test]
fn destroying_waits_for_threads_that_are_inside_the_library() {
    type Call = fn(&dyn Connection);
    let calls: [(&str, Call); 3] = [
        ("disconnect", |connection| connection.disconnect()),
        ("end, when the peer has gone", |connection| drop(connection.end())),
        ("poll_event, when the peer has gone", |connection| drop(connection.poll_event())),
    ];
    for (name, call) in calls {
        let joined = join();
        if name.contains("peer") {
            joined.destination.disconnect();
        }
        let id = {
            let world = world();
            let connects = |id: &&manager::Identifier| id.is_of(joined.port);
            world.ids.values().find(connects).expect("the identifier that connected").address()
        };
        world().held_up.insert(id);

        std::thread::scope(|scope| {
            let source = &joined.source;
            scope.spawn(move || call(&**source));
            until_inside(id);
            source.destroy();
        });

        assert_eq!(world().violations.get(&id), None, "{name}");
    }
}

#[test]
fn destroying_waits_for_a_thread_that_connects() {
    let (listener, at) = listen();
    let flag = CancelFlag::new();
    let source =
        fabric().resolve(at, LONG, &flag).expect("resolving").open(&ATTRIBUTES).expect("a queue pair");
    let id = {
        let world = world();
        world.ids.values().find(|id| id.is_of(at.port())).expect("the identifier that connects").address()
    };
    world().held_up.insert(id);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| source.establish(&ConnectParameters::connect(b""), LONG, &flag));
        let accepting = scope.spawn(|| {
            let request = listener.accept(Some(LONG), &flag).expect("a request");
            let connection = request.open(&ATTRIBUTES).expect("a queue pair");
            // The reply makes the library change the other side's queue pair, which is destroyed meanwhile.
            let _ = connection.establish(&ConnectParameters::accept(b""), LONG, &flag);
        });
        until_inside(id);
        source.destroy();
        let connected = connecting.join().expect("the connecting side");
        assert!(matches!(connected, Ok(_) | Err(RdmaError::Ended { .. })), "{connected:?}");
        accepting.join().expect("the accepting side");
    });

    assert_eq!(world().violations.get(&id), None);
}

/// Registered memory of one page, as the source or the target of a write.
fn memory(of: &dyn Connection, access: Access) -> Registration {
    of.adapter().register(Memory::anonymous(4096).expect("memory"), access).expect("a registration")
}

fn written(from: &dyn Connection, piece: &Registration, to: &Registration) -> CompletionStatus {
    let operation = Operation::Write { address: to.memory().address(), rkey: to.rkey() };
    let from_piece = piece.piece(0, 16).expect("a piece");
    from.post_send(&[SendRequest { id: 1, operation, from: from_piece, is_signalled: true }])
        .expect("posting");
    let mut completions = Vec::new();
    from.poll(Queue::Send, &mut completions, 1).expect("polling");
    completions[0].status
}

/// The accepting side's queue pair is ready although the peer never confirms. The peer can write immediately.
#[test]
fn peer_that_does_not_confirm_cannot_write_what_it_was_not_given() {
    let given = ATTRIBUTES.with_remote_write();
    let other_right = CompletionStatus::RemoteInvalidRequest;
    for (attributes, expected) in [
        (given, CompletionStatus::Success),
        (ATTRIBUTES, other_right),
        (ATTRIBUTES.apart(), other_right),
        (given.apart(), CompletionStatus::RemoteAccess),
    ] {
        let (listener, at) = listen();
        world().unconfirmed.insert(at.port());
        let (flag, waiting) = (CancelFlag::new(), CancelFlag::new());
        let source =
            fabric().resolve(at, LONG, &flag).expect("resolving").open(&ATTRIBUTES).expect("a queue pair");
        let status = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let request = listener.accept(Some(LONG), &flag).expect("a request");
                let guest = request.adapter();
                let guest = guest.register(Memory::anonymous(4096).expect("memory"), Access::REMOTE_WRITE);
                (guest.expect("a registration"), request.open(&attributes).expect("a queue pair"))
            });
            let connecting = scope.spawn(|| {
                source.establish(&ConnectParameters::connect(b""), LONG, &flag).expect("connecting")
            });
            let (guest, destination) = accepting.join().expect("the accepting side");
            let accepted = scope.spawn({
                let (destination, waiting) = (destination.clone(), &waiting);
                move || destination.establish(&ConnectParameters::accept(b""), LONG, waiting)
            });
            connecting.join().expect("the connecting side");
            let from = memory(&*source, Access::SOURCE);
            // The accepting side's call has already left the library, because the reply has arrived.
            std::thread::sleep(Duration::from_millis(20));

            let status = written(&*source, &from, &guest);

            waiting.cancel();
            let accepted = accepted.join().expect("the accepting side");
            assert!(matches!(accepted, Err(RdmaError::Cancelled { .. })), "{accepted:?}");
            drop(destination);
            status
        });
        assert_eq!(status, expected, "{attributes:?}");
    }
}
