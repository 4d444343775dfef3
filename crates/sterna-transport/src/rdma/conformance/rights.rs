//! Conformance cases: revoking and granting the peer's right to write.

use super::setup::{Buffer, MIB, Watch, assert_break, complete, send, status_of, write};
use super::{Case, Setup};
use crate::rdma::{Access, CompletionStatus, Connection, Piece, Queue, QueuePairAttributes};

pub(super) const CASES: &[Case] = &[
    ("a write without the right is refused, and nothing is written", refused_without_right),
    ("a zero-length write without the right is refused", zero_length_refused_without_right),
    ("sends continue without the right, and it can be restored", sends_go_on),
    ("nothing is written after the right was taken away under fire", nothing_after_the_call),
    ("a write to deregistered memory is a remote access error", deregistered),
    ("a queue pair that is opened without the right never has it", never_had_it),
    ("a connection apart reaches no memory of the others, even with the right", apart),
];

fn refused_without_right(setup: &Setup) {
    let joined = setup.join();
    let (from, to) = buffers(&*joined.source, &*joined.destination, MIB);

    joined.destination.set_remote_write(false).expect("taking the right");

    let watches = [Watch::on(&*joined.source), Watch::on(&*joined.destination)];

    let status = status_of(&*joined.source, to.write(1, from.piece(0, MIB)));
    assert_eq!(status, CompletionStatus::RemoteInvalidRequest);
    assert!(to.is_untouched());
    assert_break(watches, &joined);
}

fn zero_length_refused_without_right(setup: &Setup) {
    let joined = setup.join();
    joined.destination.set_remote_write(false).expect("taking the right");

    let status = status_of(&*joined.source, write(1, Piece::EMPTY, 0, 0));

    assert_eq!(status, CompletionStatus::RemoteInvalidRequest);
}

fn sends_go_on(setup: &Setup) {
    let joined = setup.join();
    let (from, to) = buffers(&*joined.source, &*joined.destination, MIB);
    joined.destination.set_remote_write(false).expect("taking the right");

    for (one, other) in [(&joined.source, &joined.destination), (&joined.destination, &joined.source)] {
        let bytes = Buffer::filled(&*one.adapter(), 4096);
        let into = Buffer::of(&*other.adapter(), 4096, Access::RECEIVE);
        other.post_receive(5, into.piece(0, 4096)).expect("a receive");
        assert_eq!(status_of(&**one, send(6, bytes.piece(0, 100))), CompletionStatus::Success);
        assert_eq!(complete(&**other, Queue::Receive).bytes, 100);
        assert_eq!(into.bytes()[..100], bytes.bytes()[..100]);
    }

    joined.destination.set_remote_write(true).expect("giving the right back");
    assert_eq!(status_of(&*joined.source, to.write(2, from.piece(0, MIB))), CompletionStatus::Success);
    assert_eq!(to.bytes(), from.bytes());
}

fn nothing_after_the_call(setup: &Setup) {
    let joined = setup.join();
    let (from, to) = buffers(&*joined.source, &*joined.destination, 4 * MIB);
    let requests: Vec<_> = (0..32)
        .map(|id| {
            let at = id as usize % 4 * MIB;
            write(id, from.piece(at, MIB), to.address() + at as u64, to.rkey())
        })
        .collect();

    joined.source.post_send(&requests).expect("posting");
    joined.destination.set_remote_write(false).expect("taking the right");
    to.block.write(0, &vec![0xee; 4 * MIB]).expect("what the guest writes from now on");

    let mut last = CompletionStatus::Success;
    for _ in 0..requests.len() {
        let status = complete(&*joined.source, Queue::Send).status;
        if last.is_success() && !status.is_success() {
            assert_eq!(status, CompletionStatus::RemoteInvalidRequest);
        }
        last = status;
    }
    assert!(to.bytes().iter().all(|byte| *byte == 0xee), "written after the right was taken away");
}

fn deregistered(setup: &Setup) {
    let joined = setup.join();
    let (from, to) = buffers(&*joined.source, &*joined.destination, MIB);
    let request = to.write(1, from.piece(0, MIB));
    let Buffer { block, registration } = to;

    drop(registration);

    assert_eq!(status_of(&*joined.source, request), CompletionStatus::RemoteAccess);
    let mut bytes = vec![0; MIB];
    block.read(0, &mut bytes).expect("reading");
    assert!(bytes.iter().all(|byte| *byte == 0));
}

const WITHOUT: QueuePairAttributes = QueuePairAttributes::new(64, 16);

fn never_had_it(setup: &Setup) {
    let joined = setup.join_as(&WITHOUT, 0);
    let (from, to) = buffers(&*joined.source, &*joined.destination, MIB);

    let status = status_of(&*joined.source, to.write(1, from.piece(0, MIB)));

    assert_eq!(status, CompletionStatus::RemoteInvalidRequest);
    assert!(to.is_untouched());
}

fn apart(setup: &Setup) {
    let other = setup.join();
    let guest = Buffer::of(&*other.destination.adapter(), MIB, Access::REMOTE_WRITE);
    for attributes in [WITHOUT.apart(), WITHOUT.apart().with_remote_write()] {
        let joined = setup.join_as(&attributes, 0);
        let from = Buffer::filled(&*joined.source.adapter(), MIB);
        joined.destination.set_remote_write(true).expect("giving the right");

        let own = Buffer::of(&*joined.destination.adapter(), 4096, Access::REMOTE_WRITE);
        let status = status_of(&*joined.source, own.write(1, from.piece(0, 4096)));
        assert_eq!(status, CompletionStatus::Success, "its own memory");
        let status = status_of(&*joined.source, guest.write(2, from.piece(0, MIB)));

        assert_eq!(status, CompletionStatus::RemoteAccess);
        assert!(guest.is_untouched());
    }
    let from = Buffer::filled(&*other.source.adapter(), MIB);
    assert_eq!(status_of(&*other.source, guest.write(3, from.piece(0, MIB))), CompletionStatus::Success);
}

fn buffers(source: &dyn Connection, destination: &dyn Connection, len: usize) -> (Buffer, Buffer) {
    (Buffer::filled(&*source.adapter(), len), Buffer::of(&*destination.adapter(), len, Access::REMOTE_WRITE))
}
