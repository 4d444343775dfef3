//! Conformance cases: operations on a connection that has ended.

use std::time::Instant;

use super::setup::{Buffer, Joined, LONG, MIB, complete, send, status_of, write};
use super::{Case, Setup};
use crate::CancelFlag;
use crate::rdma::{Access, CompletionStatus, Connection, Event, Piece, Queue, RdmaError, Wake};

pub(super) const CASES: &[Case] = &[
    ("the right is taken away from a connection that the peer has ended", right_after_peers_end),
    ("the right is taken away from a connection that this side has ended", right_after_own_end),
    ("the right is taken away from a connection that an error has broken", right_after_error),
    ("what came before the end is received after the right was taken away", received_after_right),
    ("a post to a connection that has ended is refused with its end, flushed, or never completed", posts),
    ("memory is registered and deregistered after the end", memory),
    ("the end stays the end whatever is called after it", end_stays),
    ("after destroying, every call says that the connection has ended", destroyed),
];

/// Waits until the end is reported and everything outstanding was flushed.
fn wait_for_end(connection: &dyn Connection) {
    loop {
        let deadline = Instant::now().checked_add(LONG);
        match connection.wait(Queue::Receive, deadline, &CancelFlag::new()).expect("waiting") {
            Wake::Ended => return,
            Wake::Completion => {
                connection.poll(Queue::Receive, &mut Vec::new(), 16).expect("polling");
            }
            other => panic!("{other:?} instead of the end"),
        }
    }
}

/// Revokes the right to write, twice, after the end of the connection. The peer cannot write any more.
fn take_right(connection: &dyn Connection) {
    for _ in 0..2 {
        connection.set_remote_write(false).expect("a connection that has ended has no right left");
    }
    assert!(connection.end().is_some(), "its end is known");
}

fn right_after_peers_end(setup: &Setup) {
    let joined = setup.join();
    joined.source.disconnect();
    wait_for_end(&*joined.destination);

    take_right(&*joined.destination);
}

fn right_after_own_end(setup: &Setup) {
    let joined = setup.join();
    joined.destination.disconnect();

    take_right(&*joined.destination);
}

fn right_after_error(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.destination.adapter(), 4096);

    // The key is invalid. The writing queue pair enters the error state, but no event ends the connection.
    let status = status_of(&*joined.destination, write(1, from.piece(0, 16), 0x1000, 0x7700));
    assert!(!status.is_success(), "{status}");

    for _ in 0..2 {
        joined
            .destination
            .set_remote_write(false)
            .expect("a queue pair in the error state has no right left");
    }
}

fn received_after_right(setup: &Setup) {
    let Joined { source, destination } = setup.join();
    let from = Buffer::filled(&*source.adapter(), 4096);
    let into = Buffer::of(&*destination.adapter(), 4096, Access::RECEIVE);
    for id in 0..2 {
        destination.post_receive(id, into.piece(0, 64)).expect("a receive");
    }
    assert_eq!(status_of(&*source, send(1, from.piece(0, 16))), CompletionStatus::Success);
    source.disconnect();
    let deadline = Instant::now().checked_add(LONG);
    while destination.end().is_none() {
        assert!(deadline.is_some_and(|deadline| Instant::now() < deadline), "the end is not noticed");
        std::thread::yield_now();
    }

    destination.set_remote_write(false).expect("a connection that has ended has no right left");

    let received = complete(&*destination, Queue::Receive);
    assert_eq!((received.id, received.status, received.bytes), (0, CompletionStatus::Success, 16));
    assert_eq!(into.bytes()[..16], from.bytes()[..16]);
    assert_eq!(complete(&*destination, Queue::Receive).status, CompletionStatus::WorkRequestFlushed);
}

fn posts(setup: &Setup) {
    let joined = setup.join();
    let own = Buffer::filled(&*joined.destination.adapter(), 4096);
    let into = Buffer::of(&*joined.destination.adapter(), 4096, Access::RECEIVE);
    joined.source.disconnect();
    wait_for_end(&*joined.destination);

    let is_end =
        |error: &RdmaError| matches!(error, RdmaError::Ended { event: Some(event), .. } if event.is_end());
    match joined.destination.post_send(&[send(8, own.piece(0, 16))]) {
        Ok(()) => {
            let deadline = Instant::now().checked_add(LONG);
            // An adapter flushes at its own pace, and the wait may find the end of the connection first.
            let woken = joined.destination.wait(Queue::Send, deadline, &CancelFlag::new()).expect("waiting");
            assert!(matches!(woken, Wake::Completion | Wake::Ended), "{woken:?}");
            let mut completions = Vec::new();
            joined.destination.poll(Queue::Send, &mut completions, 2).expect("polling");
            let statuses: Vec<_> = completions.iter().map(|completion| completion.status).collect();
            assert!(
                statuses.is_empty() || statuses == [CompletionStatus::WorkRequestFlushed],
                "{statuses:?}"
            );
        }
        Err(error) => assert!(is_end(&error), "{error}"),
    }
    if let Err(error) = joined.destination.post_receive(9, into.piece(0, 64)) {
        assert!(is_end(&error), "{error}");
    }
    assert!(into.is_untouched());
}

fn memory(setup: &Setup) {
    let joined = setup.join();
    let before = Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE);
    joined.destination.disconnect();

    let after = Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE);
    drop((before, after));
    joined.destination.destroy();

    drop(Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE));
}

fn end_stays(setup: &Setup) {
    let joined = setup.join();
    joined.source.disconnect();
    wait_for_end(&*joined.destination);

    joined.destination.disconnect();
    joined.destination.set_remote_write(false).expect("a connection that has ended has no right left");
    joined.destination.disconnect();

    assert_eq!(joined.destination.end(), Some(Event::Disconnected));
    let events: Vec<_> = std::iter::from_fn(|| joined.destination.poll_event()).collect();
    assert_eq!(events.iter().filter(|event| event.is_end()).count(), 1, "{events:?}");
}

fn destroyed(setup: &Setup) {
    let Joined { destination, source: _source } = setup.join();
    destination.destroy();

    let calls: [Result<(), RdmaError>; 6] = [
        destination.set_remote_write(false),
        destination.set_remote_write(true),
        destination.post_receive(1, Piece::EMPTY),
        destination.post_send(&[send(1, Piece::EMPTY)]),
        destination.poll(Queue::Send, &mut Vec::new(), 1).map(drop),
        destination.wait(Queue::Send, None, &CancelFlag::new()).map(drop),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        assert!(matches!(call, Err(RdmaError::Ended { event: None, .. })), "call {at}: {call:?}");
    }
    destination.disconnect();
    destination.destroy();
    assert!(destination.end().is_some());
}
