//! Peers that fail, disappear or break rules, and local shutdowns: errors have types, and no resource is left.

use std::time::Duration;

use sterna::rdma::StreamFailure;
use sterna_transport::rdma::RdmaError;
use sterna_transport::rdma::double::{Fault, Settings, Trigger};
use sterna_transport::{ByteStream, StreamError, TransportError};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{MessageType, encode_file};

use sterna_wire::WireError;

use super::{LIMIT, Lab, empty};
use crate::support::cause;

#[test]
fn error_of_the_peer_ends_the_stream_and_is_not_answered() {
    let lab = Lab::new(Settings::new());
    let (source, main, back) = lab.with_plain_destination();
    main.send(&[&empty(MessageType::Error)], LIMIT).unwrap();
    back.send(&[&empty(MessageType::Error)], LIMIT).unwrap();

    let written = source.write(b"stream", LIMIT).unwrap_err();
    let read = source.read(&mut [0; 4], LIMIT).unwrap_err();
    source.say_error();

    for failed in [written, read] {
        assert!(matches!(cause(&failed), Some(StreamFailure::PeerFailed)), "{failed}");
    }
    assert!(main.receive(Some(Duration::from_millis(30))).unwrap().is_none(), "an ERROR goes back");

    let (source, destination) = lab.with_plain_source();
    source.send(&[&empty(MessageType::Error)], LIMIT).unwrap();
    let read = destination.read(&mut [0; 4], LIMIT).unwrap_err();
    assert!(matches!(cause(&read), Some(StreamFailure::PeerFailed)), "{read}");
}

#[test]
fn side_that_fails_says_so_once() {
    let lab = Lab::new(Settings::new());
    let (source, main, _back) = lab.with_plain_destination();

    source.say_error();
    source.say_error();

    assert_eq!(main.receive(LIMIT).unwrap().unwrap(), empty(MessageType::Error));
    assert!(main.receive(Some(Duration::from_millis(30))).unwrap().is_none());
}

#[test]
fn messages_that_break_a_rule_are_named() {
    let mut stream = Vec::new();
    encode_file(b"stream", &mut stream).unwrap();
    let cases: [(&str, &[Vec<u8>]); 3] = [
        ("FILE, byte 4", &[stream.clone()]),
        (
            "control message, byte 4",
            &[[0, 0, 0, 99, 1, 0].map(|byte: u8| u32::from(byte).to_be_bytes()).concat()],
        ),
        ("5 bytes, but a header has 16", &[vec![7; 5]]),
    ];
    for (said, messages) in cases {
        let lab = Lab::new(Settings::new());
        let (source, main, _back) = lab.with_plain_destination();
        for message in messages {
            main.send(&[message], LIMIT).unwrap();
        }

        let asked = source
            .begin_phase(&[0x80], LIMIT)
            .and_then(|()| source.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), LIMIT));

        let Err(StreamError::Protocol(error)) = &asked else { panic!("{asked:?}") };
        assert!(error.to_string().contains(said), "{said}: {error}");
    }

    let lab = Lab::new(Settings::new());
    let (source, destination) = lab.with_plain_source();
    source.send(&[&empty(MessageType::RegisterFinished)], LIMIT).unwrap();
    let read = destination.read(&mut [0; 4], LIMIT).unwrap_err();
    let Some(WireError { rule, .. }) = cause(&read) else { panic!("{read:?}") };
    assert_eq!(rule, "no phase is open");
}

#[test]
fn ready_before_the_answer_is_named() {
    let lab = Lab::new(Settings::new());
    let (source, main, _back) = lab.with_plain_destination();
    let asked = std::thread::scope(|scope| {
        scope.spawn(|| {
            // One for the hook, one for the request, and one too early.
            for _ in 0..2 {
                main.send(&[&empty(MessageType::Ready)], LIMIT).unwrap();
                main.receive(LIMIT).unwrap().unwrap();
            }
            main.send(&[&empty(MessageType::Ready)], LIMIT).unwrap();
        });
        source
            .begin_phase(&[0x80], LIMIT)
            .and_then(|()| source.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), LIMIT))
    });

    let asked = asked.map(drop).unwrap_err();
    let Some(WireError { rule, .. }) = cause(&asked) else { panic!("{asked:?}") };
    assert_eq!(rule, "it arrived before RAM_BLOCKS_RESULT");
}

#[test]
fn shutdown_ends_every_wait() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    std::thread::scope(|scope| {
        // The destination does not read, so the source gets no READY for its writes.
        let waits = [scope.spawn(|| source.read_exact(&mut [0; 1])), scope.spawn(|| source.write_all(b"x"))];
        std::thread::sleep(Duration::from_millis(30));
        source.shutdown();
        for wait in waits {
            let ended = wait.join().unwrap().unwrap_err();
            assert!(ended.is_cancelled(), "{ended}");
        }
        // The READY for the return path arrived before.
        let ended = (0..2).find_map(|_| destination.write_all(b"x").err()).unwrap();
        assert!(ended.is_peer_gone(), "{ended}");
        destination.shutdown();
    });
    for channel in [&source, &destination] {
        assert!(channel.write_all(b"x").unwrap_err().is_cancelled());
    }
    drop((joined, source, destination));
    lab.assert_empty();
}

#[test]
fn peer_that_vanishes_is_a_reset_for_the_writer_and_the_end_for_the_reader() {
    let lab = Lab::new(Settings::new());
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_all(b"half").unwrap());
        let mut bytes = [0; 4];
        destination.read_exact(&mut bytes).unwrap();
    });

    lab.network.kill(&lab.source);

    let closed = destination.read_exact(&mut [0; 4]).unwrap_err();
    assert!(matches!(closed, TransportError::Closed { offset: 4, .. }), "{closed}");
    let reset = destination.write_all(b"x").unwrap_err();
    assert!(reset.is_peer_gone(), "{reset}");
    assert!(destination.peer_has_closed());
    assert!(source.write_all(b"x").unwrap_err().is_peer_gone());
}

/// Streams and answers until an error occurs. Returns the errors of the four threads.
fn run_until_it_breaks(lab: &Lab) -> Vec<TransportError> {
    let joined = lab.join(true);
    let (source, destination) = joined.channels();
    let ended = std::thread::scope(|scope| {
        let writer = |channel: &std::sync::Arc<sterna_transport::Channel>| {
            let channel = channel.clone();
            move || (0..50_000).find_map(|_| channel.write_all(&[5; 300]).err()).expect("an end")
        };
        let reader = |channel: &std::sync::Arc<sterna_transport::Channel>| {
            let channel = channel.clone();
            move || (0..500_000).find_map(|_| channel.read_exact(&mut [0; 100]).err()).expect("an end")
        };
        let threads = [
            scope.spawn(writer(&source)),
            scope.spawn(writer(&destination)),
            scope.spawn(reader(&source)),
            scope.spawn(reader(&destination)),
        ];
        // The first failure ends the others, as in the engine.
        let watch = scope.spawn({
            let (source, destination) = (source.clone(), destination.clone());
            move || {
                while !source.peer_has_closed() && !destination.peer_has_closed() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                source.shutdown();
                destination.shutdown();
            }
        });
        let ended = threads.map(|thread| thread.join().unwrap());
        source.shutdown();
        destination.shutdown();
        watch.join().unwrap();
        ended
    });
    ended.into()
}

#[test]
fn death_of_either_side_at_any_request_leaves_typed_errors_and_nothing_else() {
    for at in 1..=40 {
        println!("request {at}");
        let lab = Lab::new(Settings::seeded(at));
        let victim = if at % 2 == 0 { &lab.source } else { &lab.destination };
        lab.network.plan(victim, Trigger::Request(at), Fault::Kill);

        for error in run_until_it_breaks(&lab) {
            assert!(error.is_cancelled() || error.is_peer_gone(), "request {at}: {error}");
        }

        lab.assert_empty();
    }
}

#[test]
fn registration_that_fails_refuses_the_connection_and_leaves_nothing() {
    for nth in 1..=4 {
        let lab = Lab::new(Settings::new());
        lab.network.plan(&lab.source, Trigger::Registration(nth), Fault::Errno(12));
        let (to, requests) = (lab.listener.local_address(), (&super::PLAIN, Some(&super::PLAIN)));
        let failed = std::thread::scope(|scope| {
            // The main connection is established before the second connection needs memory.
            let accepted = scope.spawn(|| (nth > 2).then(|| lab.accept_main()));
            let flag = sterna_transport::CancelFlag::new();
            let connected =
                sterna::rdma::SourceStream::connect(&lab.source, to, requests, 8, super::LONG, &flag);
            accepted.join().unwrap();
            connected.map(|_| ()).unwrap_err()
        });

        assert!(matches!(failed, StreamError::Rdma(RdmaError::Registration { .. })), "{failed}");
        lab.assert_empty();
    }
}

#[test]
fn answer_that_never_comes_is_a_time_limit() {
    let lab = Lab::new(Settings::new());
    let (source, main, _back) = lab.with_plain_destination();
    main.send(&[&empty(MessageType::Ready)], LIMIT).unwrap();
    source.begin_phase(&[0x80], LIMIT).unwrap();
    main.send(&[&empty(MessageType::Ready)], LIMIT).unwrap();

    let short = Some(Duration::from_millis(30));
    let late = source.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), short).unwrap_err();

    assert!(matches!(late, StreamError::Rdma(RdmaError::TimedOut { .. })), "{late}");
}
