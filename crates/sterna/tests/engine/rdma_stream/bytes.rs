//! Bytes in both directions.

use std::time::Duration;

use sterna::rdma::{DestinationStream, SourceStream, StreamFailure};
use sterna_transport::rdma::double::Settings;
use sterna_transport::{ByteStream, CancelFlag, Channel, Direction, StreamError, TransportError};
use sterna_wire::rdma::{ConnectRequest, Header, MessageType, Part, encode_file};

use crate::support::cause;

use super::{LIMIT, LONG, Lab, MIB, PLAIN, empty, introduced};

/// Content that both sides of a test know, with random lengths of its pieces.
fn content(random: &mut fastrand::Rng, len: usize) -> (Vec<u8>, Vec<usize>) {
    let bytes = (0..len).map(|_| random.u8(..)).collect();
    let (mut cuts, mut at) = (Vec::new(), 0);
    while at < len {
        let longest = *random.choice(&[10, 2_000, 700_000]).unwrap();
        let piece = random.usize(1..=longest).min(len - at);
        cuts.push(piece);
        at += piece;
    }
    (bytes, cuts)
}

fn write(channel: &Channel, bytes: &[u8], cuts: &[usize]) {
    let mut left = bytes;
    for cut in cuts {
        channel.write_all(&left[..*cut]).unwrap();
        left = &left[*cut..];
    }
}

fn read(channel: &Channel, bytes: &[u8], cuts: &[usize]) {
    let mut left = bytes;
    for cut in cuts {
        assert_eq!(channel.peek(1).unwrap(), left[..1]);
        let mut piece = vec![0; *cut];
        channel.read_exact(&mut piece).unwrap();
        assert!(piece == left[..*cut], "at byte {}", bytes.len() - left.len());
        left = &left[*cut..];
    }
}

#[test]
fn bytes_pass_both_ways_at_once_and_nothing_is_sent_without_a_receive() {
    for seed in 0..6 {
        println!("seed {seed}");
        let lab = Lab::new(if seed == 0 { Settings::new() } else { Settings::seeded(seed) });
        let joined = lab.join(true);
        let (source, destination) = joined.channels();
        let mut random = fastrand::Rng::with_seed(seed);
        let (there, written_there) = content(&mut random, 3 * MIB);
        let (back, written_back) = content(&mut random, 300_000);
        let (_, read_there) = content(&mut random, 3 * MIB);
        let (_, read_back) = content(&mut random, 300_000);

        std::thread::scope(|scope| {
            scope.spawn(|| write(&source, &there, &written_there));
            scope.spawn(|| read(&source, &back, &read_back));
            scope.spawn(|| write(&destination, &back, &written_back));
            read(&destination, &there, &read_there);
        });

        assert_eq!(source.bytes_written(), 3 * MIB as u64);
        assert_eq!(destination.bytes_written(), 300_000);
        let counts = lab.network.counts();
        assert_eq!((counts.rnrs, counts.failed_requests, counts.writes), (0, 0, 0));
        drop((joined, source, destination));
        lab.assert_empty();
    }
}

#[test]
fn end_of_writing_is_the_end_of_reading() {
    let lab = Lab::new(Settings::seeded(9));
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut all = Vec::new();
            let mut piece = [0; 7];
            while let count @ 1.. = source.read_some(&mut piece).unwrap() {
                all.extend_from_slice(&piece[..count]);
            }
            assert_eq!(all, b"running, and that is all");
        });
        destination.write_all(b"running, ").unwrap();
        destination.write_all(b"and that is all").unwrap();
        destination.finish_writing().unwrap();
    });
    assert!(source.peer_has_closed());

    // The other direction continues until it ends, too.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            source.write_all(b"description").unwrap();
            source.finish_writing().unwrap();
        });
        let mut bytes = [0; 11];
        destination.read_exact(&mut bytes).unwrap();
        let closed = destination.read_exact(&mut bytes).unwrap_err();
        assert!(matches!(closed, TransportError::Closed { offset: 11, missing: 11, .. }), "{closed}");
    });
}

#[test]
fn reading_and_writing_stall_by_the_channels_limit_and_can_go_on() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    for channel in [&source, &destination] {
        channel.set_stall_limit(Some(Duration::from_millis(30)));
    }

    // The peer does not read, so no READY arrives, and it does not write.
    let stalled = source.write_all(b"one").unwrap_err();
    assert!(
        matches!(stalled, TransportError::Stalled { direction: Direction::Write, offset: 0, .. }),
        "{stalled}"
    );
    for _ in 0..2 {
        let stalled = source.read_exact(&mut [0; 1]).unwrap_err();
        assert!(matches!(stalled, TransportError::Stalled { direction: Direction::Read, .. }), "{stalled}");
    }

    for channel in [&source, &destination] {
        channel.set_stall_limit(Some(LONG));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_all(b"two").unwrap());
        let mut bytes = [0; 3];
        destination.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"two");
        destination.write_all(b"yes").unwrap();
        source.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"yes");
    });
}

#[test]
fn source_without_a_return_path_reads_nothing_until_it_is_over() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(false);
    let (source, destination) = joined.channels();

    let refused = destination.write_all(b"x").unwrap_err();
    assert!(matches!(cause(&refused), Some(StreamFailure::NoReturnPath)), "{refused}");
    source.set_stall_limit(Some(Duration::from_millis(20)));
    assert!(matches!(source.read_exact(&mut [0; 1]), Err(TransportError::Stalled { .. })));

    source.set_stall_limit(None);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| source.read_some(&mut [0; 1]));
        std::thread::sleep(Duration::from_millis(20));
        source.finish_reading();
        assert_eq!(reading.join().unwrap().unwrap(), 0);
    });
}

#[test]
fn end_of_reading_leaves_writing_alone() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| destination.read_some(&mut [0; 1]));
        std::thread::sleep(Duration::from_millis(20));
        destination.finish_reading();
        assert_eq!(reading.join().unwrap().unwrap(), 0);
        scope.spawn(|| destination.write_all(b"shut").unwrap());
        let mut bytes = [0; 4];
        source.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"shut");
    });
}

#[test]
fn qemu_that_sends_its_first_return_path_message_unasked_is_read() {
    let lab = Lab::new(Settings::new());
    let (source, _main, back) = lab.with_plain_destination();

    let mut message = Vec::new();
    encode_file(b"pong 1", &mut message).unwrap();
    back.send(&[&message], LIMIT).unwrap();

    let mut bytes = [0; 20];
    assert_eq!(source.read(&mut bytes, LIMIT).unwrap(), 6);
    assert_eq!(&bytes[..6], b"pong 1");
    assert!(
        back.receive(Some(Duration::from_millis(30))).unwrap().is_none(),
        "a READY before the first message"
    );
    // The next message is requested with one READY, as soon as this one is read.
    assert!(matches!(source.read(&mut bytes, Some(Duration::from_millis(30))), Err(StreamError::Quiet)));
    let ready = back.receive(LIMIT).unwrap().unwrap();
    assert_eq!(Header::decode(&ready).unwrap().kind, MessageType::Ready);
}

#[test]
fn qemu_destination_of_any_cutting_is_written_to_by_its_readys() {
    let lab = Lab::new(Settings::new());
    let (source, main, _back) = lab.with_plain_destination();
    let bytes: Vec<u8> = (0..700_000u32).map(|at| at as u8).collect();
    std::thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let mut read = Vec::new();
            while read.len() < 700_000 {
                main.send(&[&empty(MessageType::Ready)], LIMIT).unwrap();
                let message = main.receive(LIMIT).unwrap().unwrap();
                main.post_receives(1).unwrap();
                let header = Header::decode(&message).unwrap();
                assert_eq!((header.kind, header.repeat), (MessageType::File, 0));
                read.extend_from_slice(&message[Header::BYTES..]);
            }
            read
        });
        Channel::over(std::sync::Arc::new(source), "rdma").write_all(&bytes).unwrap();
        assert!(destination.join().unwrap() == bytes);
    });
}

#[test]
fn two_sternas_know_each_other_by_private_data_whose_rest_may_be_anything() {
    for (seed, introduces) in [(1, true), (2, false)] {
        let lab = Lab::new(Settings::seeded(seed));
        let introduction = introduced(Part::Main).introduction.filter(|_| introduces);
        let request = ConnectRequest { pin_all: false, introduction };
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let (asked, reply) = lab.request();
                assert_eq!(ConnectRequest::decode(asked.private_data()).unwrap(), request);
                DestinationStream::accept(asked, &reply, LONG, &CancelFlag::new()).unwrap()
            });
            let to = lab.listener.local_address();
            let connected =
                SourceStream::connect(&lab.source, to, (&request, None), 0, LONG, &CancelFlag::new());
            assert_eq!(connected.unwrap().1.introduction.is_some(), introduces);
            accepted.join().unwrap();
        });
    }
    assert_eq!(PLAIN.to_bytes(), [0, 0, 0, 1, 0, 0, 0, 0]);
}
