//! Channels: whole messages, and every way in which a call can end.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sterna_ram::{Backing, PAGE_SIZE, RamBlock, RamSlice};
use sterna_transport::{
    Address, CancelFlag, Channel, ChannelGroup, Direction, IoPart, Listener, TransportError,
};

pub(super) const LONG: Duration = Duration::from_secs(30);
pub(super) const SHORT: Duration = Duration::from_millis(60);

/// Two ends of a TCP connection over loopback.
fn tcp_pair() -> (Channel, Channel) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let flag = CancelFlag::new();
    let one = Channel::connect(&listener.local_address(), LONG, &flag).unwrap();
    (one, listener.accept(Some(LONG), &flag).unwrap())
}

/// Connected pairs over TCP and over a Unix socket.
pub(super) fn pairs() -> [(Channel, Channel); 2] {
    [tcp_pair(), Channel::pair().unwrap()]
}

/// A channel, connected to a plain socket with which the test plays the peer.
fn with_plain_peer() -> (Channel, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = Address::Tcp { host: "127.0.0.1".into(), port };
    let channel = Channel::connect(&address, LONG, &CancelFlag::new()).unwrap();
    (channel, listener.accept().unwrap().0)
}

fn filled(pages: u64) -> RamBlock {
    let block = RamBlock::new("ram", pages * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    for page in 0..pages {
        for word in (0..PAGE_SIZE as u64).step_by(512) {
            block.write_u64(page * PAGE_SIZE as u64 + word, page << 16 | word).unwrap();
        }
    }
    block
}

fn bytes(block: &RamBlock) -> Vec<u8> {
    let mut bytes = vec![0; block.len_bytes() as usize];
    block.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn channel_messages_arrive_whole_and_counted() {
    for (one, other) in pairs() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                one.write_all(b"hello").unwrap();
                one.write_parts(&[IoPart::Bytes(b" "), IoPart::Bytes(b""), IoPart::Bytes(b"world")]).unwrap();
                one.write_parts(&[]).unwrap();
            });
            let mut got = [0; 11];
            other.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"hello world");
        });
        assert_eq!((one.bytes_written(), other.bytes_read()), (11, 11));
        one.finish_writing().unwrap();
        assert_eq!(other.read_some(&mut [0; 4]).unwrap(), 0, "the orderly end");
        assert!(other.read_exact(&mut []).is_ok());
    }
}

#[test]
fn channel_thousands_of_scattered_pages_arrive_in_place() {
    const PAGES: u64 = 5000;
    for (one, other) in pairs() {
        let from = filled(PAGES);
        let to = RamBlock::new("to", from.len_bytes(), Backing::Anonymous).unwrap();
        // In reverse order, so that no two pages are adjacent in memory: 5000 vectors, with a header between some.
        let backwards: Vec<u64> = (0..PAGES).rev().collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut parts = vec![IoPart::Bytes(b"head")];
                parts.extend(backwards.iter().map(|page| IoPart::Ram(from.page(*page).unwrap())));
                one.write_parts(&parts).unwrap();
            });
            let mut head = [0; 4];
            other.read_exact(&mut head).unwrap();
            assert_eq!(&head, b"head");
            let slices: Vec<RamSlice<'_>> = backwards.iter().map(|page| to.page(*page).unwrap()).collect();
            other.read_into_ram(&slices).unwrap();
        });
        assert!(bytes(&from) == bytes(&to));
        assert_eq!(other.bytes_read(), from.len_bytes() + 4);
    }
}

#[test]
fn channel_slow_reader_with_crooked_lengths_gets_every_byte() {
    for (one, other) in pairs() {
        let from = filled(700);
        let expected = bytes(&from);
        let got = std::thread::scope(|scope| {
            scope.spawn(|| {
                // Vectors of odd lengths, in total larger than any socket buffer, so that short writes must occur.
                let (mut at, mut parts) = (0, Vec::new());
                while at < from.len_bytes() {
                    let len = (1 + at % 8191).min(from.len_bytes() - at);
                    parts.push(IoPart::Ram(from.slice(at, len as usize).unwrap()));
                    at += len;
                }
                one.write_parts(&parts).unwrap();
                one.finish_writing().unwrap();
            });
            let (mut got, mut buffer) = (Vec::new(), [0; 1777]);
            loop {
                match other.read_some(&mut buffer).unwrap() {
                    0 => break got,
                    count => got.extend_from_slice(&buffer[..count]),
                }
            }
        });
        assert!(got == expected);
    }
}

#[test]
fn channel_peeked_bytes_are_read_again() {
    for (one, other) in pairs() {
        let to = filled(2);
        one.write_all(b"QEVM0123456789abcdef").unwrap();
        assert_eq!(other.peek(4).unwrap(), b"QEVM");
        assert_eq!(other.peek(6).unwrap(), b"QEVM01");
        assert_eq!(other.peek(2).unwrap(), b"QE");
        assert_eq!(other.bytes_read(), 0);
        let mut two = [0; 2];
        other.read_exact(&mut two).unwrap();
        assert_eq!(&two, b"QE");
        assert_eq!(other.read_some(&mut two).unwrap(), 2);
        // The first window ends within the peeked bytes, the second after them.
        other.read_into_ram(&[to.slice(0, 1).unwrap(), to.slice(10, 9).unwrap()]).unwrap();
        let mut got = [0; 9];
        to.read(10, &mut got).unwrap();
        assert_eq!(&got, b"123456789");
        let mut rest = [0; 6];
        other.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"abcdef");
        assert_eq!(other.bytes_read(), 20);
    }
}

#[test]
fn channel_peer_that_closes_within_a_message_is_named_with_the_byte() {
    for (one, other) in pairs() {
        one.write_all(&[1; 10]).unwrap();
        other.read_exact(&mut [0; 4]).unwrap();
        drop(one);
        match other.read_exact(&mut [0; 100]) {
            Err(error @ TransportError::Closed { offset: 10, missing: 94, .. }) => {
                assert!(error.is_peer_gone() && !error.is_cancelled());
                assert!(error.to_string().contains("at byte 10"), "{error}");
            }
            result => panic!("{result:?}"),
        }
        assert!(matches!(other.peek(1), Err(TransportError::Closed { .. })));
    }
}

#[test]
fn channel_writing_to_a_peer_that_is_gone_is_an_error_and_no_signal() {
    for (one, other) in pairs() {
        drop(other);
        let big = vec![0; 1 << 20];
        let error = (0..100).find_map(|_| one.write_all(&big).err()).expect("nobody reads");
        assert!(matches!(error, TransportError::Reset { direction: Direction::Write, .. }), "{error}");
    }
}

#[test]
fn channel_reset_by_the_peer_is_told_from_a_close() {
    let (channel, mut peer) = with_plain_peer();
    channel.write_all(b"never read").unwrap();
    peer.write_all(b"abc").unwrap();
    channel.read_exact(&mut [0; 3]).unwrap();
    drop(peer); // with unread bytes: TCP answers with a reset
    match channel.read_exact(&mut [0; 1]) {
        Err(TransportError::Reset { direction: Direction::Read, offset: 3, .. }) => {}
        result => panic!("{result:?}"),
    }
}

#[test]
fn channel_peer_that_stalls_ends_reads_and_writes() {
    for (one, other) in pairs() {
        other.set_stall_limit(Some(SHORT));
        one.set_stall_limit(Some(SHORT));
        one.write_all(b"abc").unwrap();
        match other.read_exact(&mut [0; 10]) {
            Err(TransportError::Stalled { direction: Direction::Read, offset: 3, after, .. }) => {
                assert_eq!(after, SHORT);
            }
            result => panic!("{result:?}"),
        }
        match one.write_all(&vec![0; 64 << 20]) {
            Err(TransportError::Stalled { direction: Direction::Write, offset, .. }) => {
                assert_eq!(offset, one.bytes_written());
                assert!(offset > 3);
            }
            result => panic!("{result:?}"),
        }
        // The stall does not break the channel.
        other.set_stall_limit(None);
        assert!(other.read_some(&mut [0; 10]).unwrap() > 0);
    }
}

#[test]
fn channel_slow_peer_that_moves_is_no_stall() {
    for (one, other) in pairs() {
        other.set_stall_limit(Some(Duration::from_secs(2)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..30 {
                    one.write_all(b"x").unwrap();
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            other.read_exact(&mut [0; 30]).unwrap();
        });
    }
}

/// Reads two bytes from `silent` while bytes arrive on `busy`. The second byte arrives after 2.5 limits.
///
/// Returns the result of the read, and the longest time without a byte on `busy`.
fn read_beside(
    (silent, its_peer): (&Channel, &Channel),
    (busy, mover): (&Channel, &Channel),
    limit: Duration,
) -> (Result<[u8; 2], TransportError>, Duration) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut bytes = [0; 2];
            silent.read_exact(&mut bytes).map(|()| bytes)
        });
        its_peer.write_all(b"a").unwrap();
        let (began, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
        while began.elapsed() < limit * 5 / 2 && !reader.is_finished() {
            mover.write_all(b"x").unwrap();
            busy.read_exact(&mut [0]).unwrap();
            std::thread::sleep(limit / 40);
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        its_peer.write_all(b"b").unwrap();
        (reader.join().unwrap(), longest.max(last.elapsed()))
    })
}

#[test]
fn channel_of_a_group_is_no_stall_while_another_moves() {
    const LIMIT: Duration = Duration::from_secs(1);
    for is_tcp in [true, false] {
        loop {
            let group = ChannelGroup::new();
            let (silent, its_peer) = if is_tcp { tcp_pair() } else { Channel::pair().unwrap() };
            let (busy, mover) = tcp_pair();
            for channel in [&silent, &busy] {
                channel.join(&group);
                channel.set_stall_limit(Some(LIMIT));
                channel.probe_peer(LIMIT);
            }
            let (read, longest) = read_beside((&silent, &its_peer), (&busy, &mover), LIMIT);
            match read {
                Ok(bytes) => assert_eq!(bytes, *b"ab"),
                // A busy machine delayed the other channel too, so the stall is legitimate.
                Err(TransportError::Stalled { .. }) if longest >= LIMIT / 2 => continue,
                Err(error) => panic!("though another moved, at least every {longest:?}: {error}"),
            }
            break;
        }
    }
}

#[test]
fn channel_of_a_group_stalls_when_nothing_moves_on_any() {
    let group = ChannelGroup::new();
    for ((silent, _its_peer), (other, mover)) in
        [(tcp_pair(), tcp_pair()), (Channel::pair().unwrap(), tcp_pair())]
    {
        for channel in [&silent, &other] {
            channel.join(&group);
            channel.set_stall_limit(Some(SHORT));
        }
        mover.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        // Sent bytes do not count, because nothing shows that the peer reads them.
        silent.write_all(b"?").unwrap();
        match silent.read_exact(&mut [0; 2]) {
            Err(TransportError::Stalled { direction: Direction::Read, after: SHORT, .. }) => {}
            result => panic!("{result:?}"),
        }
        // With its own stall limit, the channel stalls whatever the others receive.
        silent.set_own_stall_limit(Some(SHORT));
        mover.write_all(b"x").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| other.read_exact(&mut [0]));
            assert!(matches!(silent.read_exact(&mut [0]), Err(TransportError::Stalled { .. })));
        });
    }
}

#[test]
fn group_counts_silence_from_the_last_byte_that_came() {
    let group = ChannelGroup::new();
    let (one, other) = tcp_pair();
    one.join(&group);
    let mut watch = group.watch();
    std::thread::sleep(SHORT);
    assert!(watch.silent_for() >= SHORT);
    let before = Instant::now();
    other.write_all(b"x").unwrap();
    one.read_exact(&mut [0]).unwrap();
    assert!(watch.silent_for() <= before.elapsed());
}

#[test]
fn channel_shut_down_from_another_thread_ends_blocked_calls_as_cancelled() {
    for (one, other) in pairs() {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| one.read_exact(&mut [0; 10]));
            let writer = scope.spawn(|| one.write_all(&vec![0; 64 << 20]));
            // Both calls block, now or soon: the peer does not read, and no buffer has room for 64 MiB.
            std::thread::sleep(SHORT);
            one.shutdown();
            for result in [reader.join().unwrap(), writer.join().unwrap()] {
                assert!(matches!(&result, Err(error) if error.is_cancelled()), "{result:?}");
            }
        });
        // Every later call fails too, also after a second shutdown.
        one.shutdown();
        assert!(one.is_shut_down());
        assert!(one.write_all(b"x").unwrap_err().is_cancelled());
        assert!(one.read_some(&mut [0; 1]).unwrap_err().is_cancelled());
        assert!(one.peek(1).unwrap_err().is_cancelled());
        // The other end finds a close or a reset, not a cancel.
        let mut sink = vec![0; 1 << 20];
        let end = loop {
            match other.read_some(&mut sink) {
                Ok(0) => break None,
                Ok(_) => {}
                Err(error) => break Some(error),
            }
        };
        assert!(end.is_none_or(|error| error.is_peer_gone()));
    }
}

#[test]
fn channel_bytes_that_came_before_a_shutdown_are_not_given_any_more() {
    let (one, other) = tcp_pair();
    one.write_all(b"late").unwrap();
    assert_eq!(other.peek(2).unwrap(), b"la");
    other.shutdown();
    assert!(other.read_exact(&mut [0; 1]).unwrap_err().is_cancelled());
}

#[test]
fn channel_dropped_closes_for_the_peer() {
    let (channel, mut peer) = with_plain_peer();
    channel.write_all(b"last words").unwrap();
    drop(channel);
    let mut all = String::new();
    peer.read_to_string(&mut all).unwrap();
    assert_eq!(all, "last words");
}

#[test]
fn channel_from_what_is_no_connected_stream_is_refused() {
    let refused = |fd: OwnedFd| matches!(Channel::from_fd(fd), Err(TransportError::System { .. }));
    assert!(refused(std::fs::File::open("/dev/null").unwrap().into()));
    assert!(refused(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()));
    assert!(refused(std::net::TcpListener::bind("127.0.0.1:0").unwrap().into()));
    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    one.set_nonblocking(true).unwrap();
    let channel = Channel::from_fd(one.as_fd().try_clone_to_owned().unwrap()).unwrap();
    channel.set_stall_limit(Some(SHORT));
    let result = channel.read_exact(&mut [0; 1]);
    assert!(matches!(result, Err(TransportError::Stalled { .. })), "blocking whatever it was: {result:?}");
}

#[test]
fn channel_both_directions_at_once_do_not_disturb_each_other() {
    for (one, other) in pairs() {
        let (done, finished) = mpsc::channel();
        std::thread::scope(|scope| {
            for (a, b) in [(&one, &other), (&other, &one)] {
                let done = done.clone();
                scope.spawn(move || {
                    for i in 0..2000u32 {
                        a.write_all(&i.to_be_bytes()).unwrap();
                    }
                });
                scope.spawn(move || {
                    for i in 0..2000u32 {
                        let mut four = [0; 4];
                        b.read_exact(&mut four).unwrap();
                        assert_eq!(u32::from_be_bytes(four), i);
                    }
                    done.send(()).unwrap();
                });
            }
        });
        assert_eq!(finished.try_iter().count(), 2);
    }
}

#[test]
fn unsent_bytes_are_those_that_the_peer_has_not_read() {
    let (here, there) = Channel::pair().unwrap();
    assert_eq!(here.unsent_bytes(), 0);

    here.write_all(&[7; 1000]).unwrap();
    assert!(here.unsent_bytes() >= 1000, "{}", here.unsent_bytes());

    there.read_exact(&mut [0; 1000]).unwrap();
    assert_eq!(here.unsent_bytes(), 0);
}

#[test]
fn unsent_bytes_over_tcp_are_not_those_that_wait_for_an_acknowledgement() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (there, _) = listener.accept().unwrap();
    let here = Channel::from_fd(here.into()).unwrap();
    // From here on it delays its acknowledgements, like a distant peer.
    rustix::net::sockopt::set_tcp_quickack(&there, false).unwrap();

    here.write_all(&[7; 1000]).unwrap();

    assert_eq!(here.unsent_bytes(), 0);
}

#[test]
fn unsent_bytes_over_tcp_are_those_for_which_the_peer_has_no_room() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (there, _) = listener.accept().unwrap();
    let here = Channel::from_fd(here.into()).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| here.write_all(&vec![7; 64 << 20]));
        // The peer does not read, so its host eventually accepts no more bytes.
        while here.unsent_bytes() == 0 {
            assert!(!writer.is_finished(), "64 MiB have found room");
            std::thread::yield_now();
        }
        here.shutdown();
        writer.join().unwrap().unwrap_err();
    });
    drop(there);
}

#[test]
fn descriptors_come_as_they_were_sent_and_bytes_around_them_stay_in_order() {
    let (one, other) = Channel::pair().unwrap();
    let (mut from, to) = std::io::pipe().unwrap();
    one.write_all(b"before").unwrap();
    one.send_descriptors(&[to.as_fd(), to.as_fd()]).unwrap();
    one.write_all(b"after").unwrap();
    one.send_descriptors(&[]).unwrap();

    let mut before = [0; 6];
    other.read_exact(&mut before).unwrap();
    let came = other.receive_descriptors().unwrap();
    let mut after = [0; 5];
    other.read_exact(&mut after).unwrap();

    assert_eq!((&before, &after, came.len()), (b"before", b"after", 2));
    assert!(other.receive_descriptors().unwrap().is_empty());
    assert_eq!((one.bytes_written(), other.bytes_read()), (13, 13));
    drop(to);
    let mut files: Vec<_> = came.into_iter().map(std::fs::File::from).collect();
    files[1].write_all(b"x").unwrap();
    drop(files);
    let mut read = Vec::new();
    from.read_to_end(&mut read).expect("the writer's last descriptor is gone");
    assert_eq!(read, b"x");
}

#[test]
fn descriptors_that_do_not_come_are_errors_and_tcp_carries_none() {
    let (one, other) = Channel::pair().unwrap();
    one.write_all(b"x").unwrap();
    assert!(other.receive_descriptors().unwrap_err().to_string().contains("another byte"));
    drop(one);
    assert!(matches!(other.receive_descriptors().unwrap_err(), TransportError::Closed { .. }));

    let credentials = other.peer_credentials().unwrap();
    assert_eq!(credentials.uid, sterna_transport::PeerCredentials::own_uid());
    assert_eq!(credentials.pid as u32, std::process::id());

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let tcp = Channel::from_fd(stream.into()).unwrap();
    assert!(tcp.send_descriptors(&[]).unwrap_err().to_string().contains("Unix socket"));
    assert!(tcp.receive_descriptors().is_err() && tcp.peer_credentials().is_err());
}
