//! The double: it behaves as adapters do, its planned faults happen, and it detects leaks.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::CancelFlag;
use sterna_transport::rdma::conformance::{self, Setup};
use sterna_transport::rdma::double::{Fault, Settings, Trigger};
use sterna_transport::rdma::{
    Access, CompletionStatus, ConnectParameters, Event, Fabric, Memory, PortState, Queue,
    QueuePairAttributes, RdmaError, SendRequest, Wake,
};

use super::{Lab, MIB, address, block, complete, registered, send, write_to};

fn conform(settings: &Settings) {
    let addresses = [address(2), "fd00::2".parse().unwrap()];
    for (at, (name, case)) in conformance::cases().enumerate() {
        let to = addresses[(at + settings.seed.unwrap_or(0) as usize) % 2];
        let lab = Lab::new(settings.clone());
        let setup = Setup::new(
            Arc::new(lab.source.clone()),
            Arc::new(lab.destination.clone()),
            Arc::new(lab.destination.other_program()),
            to,
        );
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&setup)));
        assert!(ran.is_ok(), "{name:?}, at {to}, seed {:?}", settings.seed);
        assert_eq!(lab.network.leaks(), Vec::<String>::new(), "{name:?}");
        let violations = lab.network.counts().stale_registrations;
        assert_eq!(violations > 0, name.contains("discarded"), "{name:?} discarded registered pages");
    }
}

#[test]
fn double_conforms_in_order() {
    conform(&Settings::new());
}

#[test]
fn double_conforms_with_delays_and_reordering() {
    for seed in 1..=4 {
        conform(&Settings::seeded(seed));
    }
}

#[test]
fn double_conforms_with_on_demand_paging() {
    for seed in 0..=2 {
        let mut settings = if seed == 0 { Settings::new() } else { Settings::seeded(seed) };
        settings.on_demand_paging = true;
        conform(&settings);
    }
}

#[test]
fn double_conforms_when_its_driver_takes_no_requests_in_the_error_state() {
    for seed in 0..=2 {
        let mut settings = if seed == 0 { Settings::new() } else { Settings::seeded(seed) };
        settings.refuses_posts_in_error = true;
        conform(&settings);
    }
}

#[test]
fn right_is_not_given_back_to_a_queue_pair_in_the_error_state() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    joined.destination.disconnect();

    let refused = joined.destination.set_remote_write(true).unwrap_err();

    let RdmaError::System { call: "ibv_modify_qp", source, .. } = refused else { panic!("{refused}") };
    assert_eq!(source.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn queue_pair_that_is_longer_than_the_adapter_allows_is_refused() {
    let lab = Lab::new(Settings::new());
    let most = lab.destination.adapters().unwrap()[0].max_work_requests;
    let listener = lab.destination.listen((address(2), 0).into(), 4).unwrap();
    let open = |attributes| {
        let route = lab.source.resolve(listener.local_address(), super::LONG, &CancelFlag::new()).unwrap();
        route.open(&attributes)
    };

    assert!(open(QueuePairAttributes::new(most, most)).is_ok());
    for attributes in [QueuePairAttributes::new(most + 1, 1), QueuePairAttributes::new(1, most + 1)] {
        let refused = open(attributes).unwrap_err();
        assert!(matches!(refused, RdmaError::System { call: "rdma_create_qp", .. }), "{refused}");
    }
}

/// The peer omits the connection manager's last message (RTU).
#[test]
fn queue_pair_is_ready_before_the_peer_has_confirmed_and_the_wait_for_it_ends() {
    let lab = Lab::new(Settings::new());
    let listener = lab.destination.listen((address(2), 0).into(), 4).unwrap();
    let flag = CancelFlag::new();
    let attributes = QueuePairAttributes::new(4, 4).with_remote_write();
    lab.network.withhold_confirmations(&lab.source, 0);
    let route = lab.source.resolve(listener.local_address(), super::LONG, &flag).unwrap();
    let source = route.open(&attributes).unwrap();
    let destination = std::thread::scope(|scope| {
        let connecting =
            scope.spawn(|| source.establish(&ConnectParameters::connect(b""), super::LONG, &flag).unwrap());
        let destination = listener.accept(Some(super::LONG), &flag).unwrap().open(&attributes).unwrap();

        let limit = Duration::from_millis(50);
        let accepted = destination.establish(&ConnectParameters::accept(b""), limit, &flag);

        assert!(matches!(accepted, Err(RdmaError::TimedOut { .. })), "{accepted:?}");
        connecting.join().unwrap();
        destination
    });
    assert_eq!(lab.network.writable_queue_pairs(&lab.destination), 1);
    drop((source, destination));
    assert_eq!(lab.network.leaks(), ["1 listeners"]);
}

#[test]
fn requests_of_different_queue_pairs_overtake_each_other() {
    let mut overtaken = 0;
    for seed in 1..=20 {
        let lab = Lab::new(Settings::seeded(seed));
        let pairs = [lab.join(), lab.join()];
        let (from, to) = (block(MIB), block(MIB));
        let from = registered(&*pairs[0].source.adapter(), &from, Access::SOURCE);
        let target = registered(&*pairs[0].destination.adapter(), &to, Access::REMOTE_WRITE);
        from.memory().slice().part(0, 8).unwrap().copy_from(&1u64.to_ne_bytes()).unwrap();
        from.memory().slice().part(8, 8).unwrap().copy_from(&2u64.to_ne_bytes()).unwrap();

        lab.network.hold();
        for (at, pair) in pairs.iter().enumerate() {
            pair.source.post_send(&[write_to(0, from.piece(at * 8, 8).unwrap(), &target, 0)]).unwrap();
        }
        lab.network.resume();
        pairs.iter().for_each(|pair| assert!(complete(&*pair.source, Queue::Send).status.is_success()));

        match to.read_u64(0).unwrap() {
            1 => overtaken += 1,
            last => assert_eq!(last, 2),
        }
    }
    assert!((1..20).contains(&overtaken), "{overtaken} of 20");
}

#[test]
fn planned_registrations_fail() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let adapter = joined.source.adapter();
    lab.network.plan(&lab.source, Trigger::Registration(2), Fault::Errno(12));
    let ram = block(MIB);
    let register = || adapter.register(Memory::of_block(&ram, 0, MIB).unwrap(), Access::SOURCE);

    let first = register().unwrap();
    let second = register().unwrap_err();
    let third = register().unwrap();

    let RdmaError::Registration { source, len, .. } = second else { panic!("{second}") };
    assert_eq!((source.kind(), len), (io::ErrorKind::OutOfMemory, MIB as u64));
    let counts = lab.network.counts_of(&lab.source);
    assert_eq!((counts.registrations, counts.registrations_made, counts.registrations_failed), (2, 2, 1));
    assert_eq!((counts.pinned_bytes, counts.pinned_bytes_most), (2 * MIB as u64, 2 * MIB as u64));
    drop((first, third));
    assert_eq!(lab.network.counts().pinned_bytes, 0);
}

#[test]
fn locked_memory_limit_is_named() {
    let mut settings = Settings::new();
    settings.locked_memory_bytes = Some(MIB as u64 + 4096);
    let lab = Lab::new(settings);
    let joined = lab.join();
    let ram = block(2 * MIB);
    let adapter = joined.source.adapter();
    let _half = adapter.register(Memory::of_block(&ram, 0, MIB).unwrap(), Access::SOURCE).unwrap();
    assert!(adapter.locked_memory().has_room(4096) && !adapter.locked_memory().has_room(4097));

    let refused = adapter.register(Memory::of_block(&ram, 0, MIB).unwrap(), Access::SOURCE).unwrap_err();

    assert!(
        matches!(refused, RdmaError::LockedMemory { wanted, pinned, limit }
            if (wanted, pinned, limit) == (MIB as u64, MIB as u64, MIB as u64 + 4096)),
        "{refused}"
    );
}

#[test]
fn planned_status_breaks_the_connection() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let (ram, target) = (block(MIB), block(MIB));
    let from = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
    let to = registered(&*joined.destination.adapter(), &target, Access::REMOTE_WRITE);
    lab.network.plan(&lab.source, Trigger::Request(2), Fault::Status(CompletionStatus::RemoteOperation));

    let statuses: Vec<_> = (0..3)
        .map(|id| {
            joined.source.post_send(&[write_to(id, from.piece(0, 16).unwrap(), &to, 0)]).unwrap();
            complete(&*joined.source, Queue::Send).status
        })
        .collect();

    let expected =
        [CompletionStatus::Success, CompletionStatus::RemoteOperation, CompletionStatus::WorkRequestFlushed];
    assert_eq!(statuses, expected);
}

#[test]
fn killed_peer_is_seen_as_a_disconnect() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let (ram, target) = (block(MIB), block(MIB));
    let from = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
    let to = registered(&*joined.destination.adapter(), &target, Access::REMOTE_WRITE);

    lab.network.kill(&lab.destination);

    let woken = joined.source.wait(Queue::Receive, None, &CancelFlag::new()).unwrap();
    assert_eq!((woken, joined.source.end()), (Wake::Ended, Some(Event::Disconnected)));
    joined.source.post_send(&[write_to(1, from.piece(0, 16).unwrap(), &to, 0)]).unwrap();
    joined.source.disconnect();
    assert_eq!(complete(&*joined.source, Queue::Send).status, CompletionStatus::WorkRequestFlushed);
    assert!(matches!(joined.destination.end(), Some(Event::Fatal(_))));
}

#[test]
fn link_that_comes_back_loses_nothing_and_one_that_does_not_breaks_the_connection() {
    for comes_back in [true, false] {
        let mut settings = Settings::new();
        settings.retry_limit = Duration::from_millis(if comes_back { 60_000 } else { 50 });
        let lab = Lab::new(settings);
        let joined = lab.join();
        let (ram, target) = (block(MIB), block(MIB));
        let from = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
        let to = registered(&*joined.destination.adapter(), &target, Access::REMOTE_WRITE);

        lab.network.set_link(&lab.destination, false);
        assert_eq!(joined.destination.adapter().info().state, PortState::Down);
        joined.source.post_send(&[write_to(1, from.piece(0, 16).unwrap(), &to, 0)]).unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        if comes_back {
            assert_eq!(
                joined.source.wait(Queue::Send, Some(soon), &CancelFlag::new()).unwrap(),
                Wake::TimedOut
            );
            lab.network.set_link(&lab.destination, true);
        }

        let status = complete(&*joined.source, Queue::Send).status;
        let expected = if comes_back { CompletionStatus::Success } else { CompletionStatus::RetryExceeded };
        assert_eq!(status, expected);
        let events: Vec<_> = std::iter::from_fn(|| joined.destination.poll_event()).collect();
        assert_eq!(events[..2], [Event::Established, Event::PortDown]);
    }
}

#[test]
fn removed_device_ends_its_connections_and_registers_nothing() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let ram = block(MIB);

    lab.network.remove_device(&lab.source);

    assert_eq!(joined.source.end(), Some(Event::DeviceRemoved));
    assert_eq!(joined.destination.end(), None, "the peer sees silence");
    let refused = joined.source.adapter().register(Memory::of_block(&ram, 0, MIB).unwrap(), Access::SOURCE);
    assert!(matches!(refused, Err(RdmaError::Registration { .. })));
}

#[test]
fn discarded_pages_under_a_registration_are_noticed_even_if_nothing_is_written() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let ram = sterna_ram::RamBlock::new("ram", 4 * MIB as u64, sterna_ram::Backing::Memfd).unwrap();
    let registration = registered(&*joined.destination.adapter(), &ram, Access::REMOTE_WRITE);
    assert_eq!(lab.network.counts().stale_registrations, 0);

    let file = ram.shared_file().unwrap().file;
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, MIB as u64, 4096).unwrap();

    assert_eq!(lab.network.counts().stale_registrations, 1);
    drop(registration);
    assert_eq!(lab.network.counts().stale_registrations, 1);
}

#[test]
fn leaks_are_listed() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let ram = block(MIB);
    let registration = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
    let listener = lab.destination.listen((address(2), 7).into(), 1).unwrap();

    assert_eq!(
        lab.network.leaks(),
        ["1 registrations", "1048576 pinned bytes", "2 queue pairs", "1 listeners"]
    );

    drop((joined, registration, listener));
    assert_eq!(lab.network.leaks(), Vec::<String>::new());
}

#[test]
fn held_network_executes_nothing() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join();
    let ram = block(MIB);
    let from = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
    let into = registered(&*joined.destination.adapter(), &ram, Access::RECEIVE);
    joined.destination.post_receive(1, into.piece(0, 64).unwrap()).unwrap();

    lab.network.hold();
    joined.source.post_send(&[send(1, from.piece(0, 16).unwrap())]).unwrap();
    let soon = Instant::now() + Duration::from_millis(30);
    assert_eq!(joined.source.wait(Queue::Send, Some(soon), &CancelFlag::new()).unwrap(), Wake::TimedOut);
    lab.network.resume();

    assert!(complete(&*joined.source, Queue::Send).status.is_success());
    let counts = lab.network.counts();
    assert_eq!((counts.sends, counts.send_bytes, counts.writes, counts.rnrs), (1, 16, 0, 0));
}

#[test]
fn flood_of_requests_stops_at_the_backlog() {
    let lab = Lab::new(Settings::new());
    let listener = lab.destination.listen((address(2), 0).into(), 2).unwrap();
    let flag = CancelFlag::new();
    let attributes = QueuePairAttributes::new(4, 4);

    let asked: Vec<_> = (0..4)
        .map(|_| {
            let route = lab.source.resolve(listener.local_address(), super::LONG, &flag).unwrap();
            let connection = route.open(&attributes).unwrap();
            let parameters = sterna_transport::rdma::ConnectParameters::connect(b"");
            connection.establish(&parameters, Duration::from_millis(10), &flag).unwrap_err()
        })
        .collect();

    assert!(asked[..2].iter().all(|error| matches!(error, RdmaError::TimedOut { .. })), "{asked:?}");
    assert!(asked[2..].iter().all(|error| matches!(error, RdmaError::Rejected { .. })), "{asked:?}");
    assert_eq!(lab.network.counts_of(&lab.destination).queue_pairs_made, 0);
    drop(listener);
    assert_eq!(lab.network.leaks(), Vec::<String>::new());
}

#[test]
fn unsignalled_requests_need_places() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join_with(&QueuePairAttributes::new(2, 1).with_remote_write());
    let (ram, target) = (block(MIB), block(MIB));
    let from = registered(&*joined.source.adapter(), &ram, Access::SOURCE);
    let to = registered(&*joined.destination.adapter(), &target, Access::REMOTE_WRITE);
    let request = SendRequest { is_signalled: false, ..write_to(1, from.piece(0, 16).unwrap(), &to, 0) };

    let full = joined.source.post_send(&[request; 3]).unwrap_err();

    assert!(matches!(full, RdmaError::QueueFull { posted: 2, .. }), "{full}");
}
