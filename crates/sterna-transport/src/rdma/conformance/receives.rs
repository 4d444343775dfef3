//! Conformance cases: sends, receives, and requests without a receive.

use std::time::Instant;

use super::setup::{Buffer, MIB, SHORT, Watch, assert_break, complete, send, status_of, write};
use super::{Case, Setup};
use crate::CancelFlag;
use crate::rdma::{
    Access, CompletionKind, CompletionStatus, Operation, Piece, Queue, RdmaError, SendRequest, Wake,
};

pub(super) const CASES: &[Case] = &[
    ("without RNR retries a send without a receive fails", rnr_0),
    ("with 7 RNR retries a send waits for its receive", rnr_7),
    ("what was written is there when a later send arrives", writes_before_send),
    ("a message longer than its receive breaks the connection", too_long),
    ("a write with immediate completes a receive", immediate),
    ("a write with immediate without a receive fails", immediate_without_receive),
    ("after an error all outstanding is flushed in order", flush),
    ("a signalled completion frees the places before it", places),
];

fn rnr_0(setup: &Setup) {
    let joined = setup.join_with(0);
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let watch = Watch::on(&*joined.source);

    let status = status_of(&*joined.source, send(1, from.piece(0, 16)));

    assert_eq!(status, CompletionStatus::RnrRetryExceeded);
    watch.assert_in_error(&*joined.source);
}

fn rnr_7(setup: &Setup) {
    let joined = setup.join_with(7);
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);

    joined.source.post_send(&[send(1, from.piece(0, 16))]).expect("posting");
    let deadline = Instant::now().checked_add(SHORT);
    let woken = joined.source.wait(Queue::Send, deadline, &CancelFlag::new()).expect("waiting");
    assert_eq!(woken, Wake::TimedOut);
    joined.destination.post_receive(2, into.piece(0, 4096)).expect("a receive");

    assert_eq!(complete(&*joined.source, Queue::Send).status, CompletionStatus::Success);
    assert_eq!(complete(&*joined.destination, Queue::Receive).bytes, 16);
}

fn writes_before_send(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), MIB);
    let to = Buffer::of(&*joined.destination.adapter(), 4 * MIB, Access::REMOTE_WRITE);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);
    joined.destination.post_receive(9, into.piece(0, 4096)).expect("a receive");

    let mut requests: Vec<SendRequest> = (0..4)
        .map(|at| SendRequest {
            is_signalled: false,
            ..write(at, from.piece(0, MIB), to.address() + at * MIB as u64, to.rkey())
        })
        .collect();
    requests.push(send(4, from.piece(0, 16)));
    joined.source.post_send(&requests).expect("posting");

    let received = complete(&*joined.destination, Queue::Receive);
    assert_eq!((received.id, received.kind, received.bytes), (9, CompletionKind::Receive, 16));
    assert_eq!(to.bytes(), from.bytes().repeat(4));
    // Only the send was signalled, so it has the only completion.
    assert_eq!(complete(&*joined.source, Queue::Send).id, 4);
}

fn too_long(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);
    joined.destination.post_receive(9, into.piece(0, 16)).expect("a receive");
    let watches = [Watch::on(&*joined.source), Watch::on(&*joined.destination)];

    let status = status_of(&*joined.source, send(1, from.piece(0, 17)));

    // Adapters differ in the status.
    use CompletionStatus::{RemoteInvalidRequest, RemoteOperation};
    assert!(matches!(status, RemoteInvalidRequest | RemoteOperation), "{status}");
    assert!(!complete(&*joined.destination, Queue::Receive).status.is_success());
    assert_break(watches, &joined);
}

fn immediate(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), MIB);
    let to = Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);
    for id in 0..2 {
        joined.destination.post_receive(id, into.piece(0, 4096)).expect("a receive");
    }

    for (request, bytes) in [
        (with_immediate(1, from.piece(0, MIB), &to, 0xdead_0001), MIB as u32),
        // A doorbell: a write with immediate and without bytes.
        (with_immediate(2, Piece::EMPTY, &to, 0xdead_0002), 0),
    ] {
        assert_eq!(status_of(&*joined.source, request), CompletionStatus::Success);
        let received = complete(&*joined.destination, Queue::Receive);
        let Operation::WriteWithImmediate { immediate, .. } = request.operation else { unreachable!() };
        assert_eq!((received.kind, received.bytes), (CompletionKind::ReceiveImmediate(immediate), bytes));
    }
    assert_eq!(to.bytes(), from.bytes());
    assert!(into.is_untouched());
}

fn immediate_without_receive(setup: &Setup) {
    let joined = setup.join_with(0);
    let from = Buffer::filled(&*joined.source.adapter(), MIB);
    let to = Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE);

    let status = status_of(&*joined.source, with_immediate(1, from.piece(0, MIB), &to, 7));

    assert_eq!(status, CompletionStatus::RnrRetryExceeded);
    assert_eq!(to.bytes()[..MIB / 2], from.bytes()[..MIB / 2], "all but the last packet is written");
    assert_eq!(to.bytes().last(), Some(&0), "the last packet is not");
}

fn flush(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let to = Buffer::of(&*joined.destination.adapter(), 4096, Access::REMOTE_WRITE);
    let into = Buffer::of(&*joined.source.adapter(), 4096, Access::RECEIVE);
    for id in 50..53 {
        joined.source.post_receive(id, into.piece(0, 16)).expect("a receive");
    }

    let good = |id| SendRequest { is_signalled: false, ..to.write(id, from.piece(0, 16)) };
    let bad = SendRequest { is_signalled: false, ..write(2, from.piece(0, 16), to.address(), 0) };
    joined.source.post_send(&[good(1), bad, good(3), good(4)]).expect("posting");

    let found: Vec<_> =
        (0..3).map(|_| complete(&*joined.source, Queue::Send)).map(|c| (c.id, c.status)).collect();
    let flushed = CompletionStatus::WorkRequestFlushed;
    assert_eq!(found, [(2, CompletionStatus::RemoteAccess), (3, flushed), (4, flushed)]);
    for id in 50..53 {
        let receive = complete(&*joined.source, Queue::Receive);
        assert_eq!((receive.id, receive.status), (id, flushed));
    }
}

fn places(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), 4096);
    let to = Buffer::of(&*joined.destination.adapter(), 4096, Access::REMOTE_WRITE);
    let batch: Vec<SendRequest> =
        (0..16).map(|id| SendRequest { is_signalled: id == 15, ..to.write(id, from.piece(0, 16)) }).collect();

    // Many more requests than the queue has slots.
    for _ in 0..64 {
        joined.source.post_send(&batch).expect("posting");
        assert_eq!(complete(&*joined.source, Queue::Send).id, 15);
    }

    let unsignalled = SendRequest { is_signalled: false, ..batch[0] };
    let mut posted = 0;
    let full = loop {
        // An adapter may have somewhat more slots than requested.
        assert!(posted < 1 << 16, "the queue is never full");
        match joined.source.post_send(&[unsignalled]) {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, RdmaError::QueueFull { queue: "send", posted: 0, .. }), "{full}");
    assert!(posted >= 64, "{posted}");
}

fn with_immediate(id: u64, from: Piece, to: &Buffer, immediate: u32) -> SendRequest {
    let operation = Operation::WriteWithImmediate { address: to.address(), rkey: to.rkey(), immediate };
    SendRequest { id, operation, from, is_signalled: true }
}
