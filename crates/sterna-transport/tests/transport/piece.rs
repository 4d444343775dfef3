//! Pieces that are relayed between two channels, spliced or copied. The tests cover complete data and every end of
//! a call.

use std::sync::mpsc;

use sterna_transport::{Channel, Direction, Piece, TransportError};

use crate::channel::{LONG, SHORT, pairs};
use crate::tls::{pair as tls_pair, pattern};

const MOST: usize = 100_003;

/// Relays from one channel to the other until the end. Returns the numbers of bytes and pieces.
fn relay(from: &Channel, to: &Channel, mut piece: Piece) -> (u64, usize) {
    let (mut bytes, mut pieces) = (0, 0);
    loop {
        match from.read_piece(&mut piece).unwrap() {
            0 => return (bytes, pieces),
            length => {
                assert_eq!(piece.len(), length);
                assert!(length <= MOST);
                to.write_piece(&mut piece).unwrap();
                assert!(piece.is_empty());
                bytes += length as u64;
                pieces += 1;
            }
        }
    }
}

/// Asserts that a relay between two pairs delivers all bytes.
///
/// It connects the second channel of the first pair with the first channel of the second pair.
fn assert_whole((one, from): (Channel, Channel), (to, other): (Channel, Channel), piece: Piece, what: &str) {
    let sent = pattern(3_000_017);
    std::thread::scope(|scope| {
        let relays = scope.spawn(|| {
            let relayed = relay(&from, &to, piece);
            to.finish_writing().unwrap();
            relayed
        });
        scope.spawn(|| {
            // Writes of odd lengths, from one byte to more than any buffer.
            let mut rest = &sent[..];
            for length in [1, 3, 4095, 4097, 70_001, 1, 333_333].into_iter().cycle() {
                let (part, after) = rest.split_at(length.min(rest.len()));
                one.write_all(part).unwrap();
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            one.finish_writing().unwrap();
        });
        let mut come = vec![0; sent.len()];
        other.read_exact(&mut come).unwrap();
        assert!(come == sent, "{what}: bytes differ");
        assert_eq!(other.read_some(&mut [0; 1]).unwrap(), 0, "{what}: the end");
        let (bytes, pieces) = relays.join().unwrap();
        assert_eq!(bytes, sent.len() as u64, "{what}");
        assert!(pieces >= sent.len() / MOST, "{what}");
    });
    let sent = sent.len() as u64;
    assert_eq!((from.bytes_read(), to.bytes_written()), (sent, sent), "{what}");
}

#[test]
fn all_bytes_arrive_between_sockets_of_each_kind() {
    for from in 0..2 {
        for to in 0..2 {
            let ends = || (pairs().into_iter().nth(from).unwrap(), pairs().into_iter().nth(to).unwrap());
            let (first, second) = ends();
            let piece = Piece::between(&first.1, &second.0, MOST);
            assert!(piece.is_spliced());
            assert_whole(first, second, piece, &format!("{from} to {to}, spliced"));
            let (first, second) = ends();
            assert_whole(first, second, Piece::copying(MOST), &format!("{from} to {to}, copied"));
        }
    }
}

#[test]
fn bytes_from_or_to_an_end_with_tls_are_copied() {
    let (first, second) = (Channel::pair().unwrap(), tls_pair());
    let piece = Piece::between(&first.1, &second.0, MOST);
    assert!(!piece.is_spliced());
    assert_whole(first, second, piece, "to TLS");
    let (first, second) = (tls_pair(), Channel::pair().unwrap());
    let piece = Piece::between(&first.1, &second.0, MOST);
    assert!(!piece.is_spliced());
    assert_whole(first, second, piece, "from TLS");

    // The bytes may already be in the pipe when the destination turns out to use TLS.
    let ((one, from), (to, other)) = (Channel::pair().unwrap(), tls_pair());
    let mut piece = Piece::between(&one, &from, MOST);
    one.write_all(b"a secret").unwrap();
    from.read_piece(&mut piece).unwrap();
    to.write_piece(&mut piece).unwrap();
    let mut come = [0; 8];
    other.read_exact(&mut come).unwrap();
    assert_eq!(&come, b"a secret");
    assert!(!piece.is_spliced(), "it does not try again");
}

#[test]
fn what_was_peeked_at_comes_first() {
    for (one, from) in pairs() {
        let (to, other) = Channel::pair().unwrap();
        let mut piece = Piece::between(&from, &to, MOST);
        one.write_all(b"QEVM and more").unwrap();
        assert_eq!(from.peek(4).unwrap(), b"QEVM");
        assert_eq!(from.read_piece(&mut piece).unwrap(), 4);
        // New bytes are appended to those that the piece already contains.
        assert_eq!(from.read_piece(&mut piece).unwrap(), 9);
        assert_eq!((piece.len(), from.bytes_read()), (13, 13));
        to.write_piece(&mut piece).unwrap();
        let mut come = [0; 13];
        other.read_exact(&mut come).unwrap();
        assert_eq!(&come, b"QEVM and more");
        assert!(piece.is_spliced(), "what follows");

        for part in [&b"first, "[..], b"second, ", b"third"] {
            one.write_all(part).unwrap();
            assert_eq!(from.read_piece(&mut piece).unwrap(), part.len());
        }
        to.write_piece(&mut piece).unwrap();
        let mut come = [0; 20];
        other.read_exact(&mut come).unwrap();
        assert_eq!(&come, b"first, second, third");
    }
}

#[test]
fn a_piece_that_waits_lets_others_pass() {
    let ((one, from), (to, other)) = (Channel::pair().unwrap(), Channel::pair().unwrap());
    let mut waits = Piece::between(&from, &to, MOST);
    let mut next = Piece::between(&from, &to, MOST);
    one.write_all(b"last").unwrap();
    from.read_piece(&mut waits).unwrap();
    one.write_all(b"next").unwrap();
    from.read_piece(&mut next).unwrap();
    std::mem::swap(&mut waits, &mut next);
    to.write_piece(&mut next).unwrap();
    to.write_piece(&mut waits).unwrap();
    let mut come = [0; 8];
    other.read_exact(&mut come).unwrap();
    assert_eq!(&come, b"lastnext");
}

#[test]
fn peer_that_is_gone_is_an_error() {
    for spliced in [true, false] {
        for ((one, from), (to, other)) in pairs().into_iter().zip(pairs()) {
            let piece =
                |from, to| if spliced { Piece::between(from, to, MOST) } else { Piece::copying(MOST) };
            let mut piece = piece(&from, &to);
            one.write_all(&pattern(50_000)).unwrap();
            drop(other);
            // A socket reports a closed peer only when it is written to.
            let error = std::iter::repeat_with(|| {
                if piece.is_empty() {
                    one.write_all(&[1]).unwrap();
                    from.read_piece(&mut piece).unwrap();
                }
                to.write_piece(&mut piece)
            })
            .find_map(Result::err)
            .unwrap();
            assert!(matches!(error, TransportError::Reset { direction: Direction::Write, .. }), "{error:?}");
            // Bytes that were not read are lost when their sender closes.
            drop(one);
            let mut rest = Piece::between(&from, &to, MOST);
            while from.read_piece(&mut rest).unwrap() > 0 {}
        }
    }
}

#[test]
fn any_thread_ends_a_call_that_waits() {
    for ((one, from), (to, other)) in pairs().into_iter().zip(pairs()) {
        // A call that waits for bytes.
        let mut piece = Piece::between(&from, &to, MOST);
        assert!(piece.is_spliced());
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| tell.send(from.read_piece(&mut piece)).unwrap());
            assert!(told.recv_timeout(SHORT).is_err(), "nothing has come");
            from.shutdown();
            let ended = told.recv_timeout(LONG).unwrap();
            assert!(matches!(ended, Err(TransportError::Cancelled { .. })), "{ended:?}");
        });
        let mut piece = Piece::between(&from, &to, MOST);
        let later = from.read_piece(&mut piece);
        assert!(matches!(later, Err(TransportError::Cancelled { .. })), "{later:?}");
        drop(one);

        // A call that waits for room.
        let (one, from) = Channel::pair().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| while one.write_all(&[7; MOST]).is_ok() {});
            scope.spawn(|| {
                let ended = loop {
                    from.read_piece(&mut piece).unwrap();
                    if let Err(ended) = to.write_piece(&mut piece) {
                        break ended;
                    }
                };
                tell.send(ended).unwrap();
            });
            assert!(told.recv_timeout(SHORT).is_err(), "the peer's buffers have room");
            to.shutdown();
            let ended = told.recv_timeout(LONG).unwrap();
            assert!(matches!(ended, TransportError::Cancelled { .. }), "{ended:?}");
            from.shutdown();
        });
        drop(other);
    }
}

#[test]
fn silence_ends_a_call_after_its_limit() {
    for ((one, from), (to, other)) in pairs().into_iter().zip(pairs()) {
        let mut piece = Piece::between(&from, &to, MOST);
        from.set_stall_limit(Some(SHORT));
        let ended = from.read_piece(&mut piece);
        assert!(
            matches!(ended, Err(TransportError::Stalled { direction: Direction::Read, .. })),
            "{ended:?}"
        );
        from.set_stall_limit(None);

        to.set_stall_limit(Some(SHORT));
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| while one.write_all(&[7; MOST]).is_ok() {});
            let ended = loop {
                from.read_piece(&mut piece).unwrap();
                if let Err(ended) = to.write_piece(&mut piece) {
                    break ended;
                }
            };
            // Shut down the writer's own end: shutting down its TCP peer with a full buffer would not unblock it.
            one.shutdown();
            ended
        });
        assert!(matches!(ended, TransportError::Stalled { direction: Direction::Write, .. }), "{ended:?}");
        drop(other);
    }
}
