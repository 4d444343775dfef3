//! Connections that should not be there, or are missing, and rounds that do not add up.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use crate::support;
use crate::support::recording::{Recording, Sent};
use crate::support::{
    assert_failed, assert_next_works, assert_reset, case, eventually, port, vm, vms, waiting,
};
use sterna::{Arrival, Capabilities, Fault, Incoming, MigrationError, Parameters, Status};

const MACHINE: &str = "sterna-process";
const FLUSH: &[u8] = &[0, 0, 0, 0, 0, 0, 2, 0];
/// END of RAM, which holds nothing.
const END: &[u8] = &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x10];
const PACKET: usize = 1344;

fn settings(lanes: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    params.limits = support::SHORT;
    (params, capabilities)
}

fn failed(incoming: &Incoming) -> MigrationError {
    eventually("the end", || incoming.status().is_terminal());
    let arrival = incoming.wait();
    let Arrival::Failed(why) = arrival else { panic!("{arrival:?}") };
    why
}

/// A destination of two lanes that must refuse `recording`.
fn refused(recording: &Recording) -> MigrationError {
    let (params, capabilities) = settings(2);
    let (target, incoming) = waiting(&params, capabilities);
    let sent = recording.send(&incoming.address(), true);
    let why = failed(&incoming);
    drop(sent);
    assert_reset(&target);
    why
}

fn connect(incoming: &Incoming) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port(&incoming.address()))).unwrap()
}

/// Migrates with other settings on each side; both must fail.
fn mismatch(theirs: (Parameters, Capabilities), ours: (Parameters, Capabilities)) -> MigrationError {
    let (source, target) = vms();
    let incoming = vm::listen(&target, &theirs.0, theirs.1);
    let migration = vm::start(&source, &incoming.address(), &ours.0, ours.1, Arc::new(()));
    eventually("the source's end", || migration.outcome().is_some());
    let why = failed(&incoming);
    assert_failed(&migration.wait(), &Arrival::Failed(why.clone()), &source, &target);
    assert_next_works(&source, &target);
    why
}

#[test]
fn other_number_of_channels_is_refused() {
    for (theirs, ours) in [(2, 4), (0, 2), (1, 2)] {
        case(&format!("{ours} to {theirs}"), || {
            let why = mismatch(settings(theirs), settings(ours));
            assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
            assert!(why.to_string().contains("multifd"), "{why}");
        });
    }
}

#[test]
fn missing_channel_is_waited_for_only_so_long() {
    for ours in [0, 1] {
        case(&format!("{ours} to 2"), || {
            let why = mismatch(settings(2), settings(ours));
            assert!(matches!(why, MigrationError::Limit { .. }), "{why:?}");
            assert!(why.to_string().contains("channel"), "what is missing: {why}");
        });
    }
}

#[test]
fn other_compression_is_refused() {
    case("zstd to none", || {
        let (mut params, capabilities) = settings(2);
        params.multifd_compression = sterna::Compression::Zstd;
        let why = mismatch(settings(2), (params, capabilities));
        assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
    });
}

#[test]
fn port_scanner_and_silent_connections_do_not_disturb() {
    case("scanned", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let silent: Vec<_> = (0..40).map(|_| connect(&incoming)).collect();
        for greeting in [&b"GET / HTTP/1.0\r\n\r\n"[..], b"SSH-2.0-x\r\n", b"\0\0\0\0", b"Q", b""] {
            let mut scanner = connect(&incoming);
            scanner.write_all(greeting).unwrap();
            // It may have been turned away by now.
            let _ = scanner.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = scanner.read_to_end(&mut answer);
            assert_eq!(answer, b"");
        }
        assert_eq!(incoming.status(), Status::Setup);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        // With the last handle everything goes, also what still says nothing.
        drop(incoming);
        drop(silent);
    });
}

#[test]
fn silent_connection_goes_when_the_destination_is_dropped() {
    case("silent", || {
        let (params, capabilities) = common::multifd(2);
        let (_target, incoming) = waiting(&params, capabilities);
        let mut silent = connect(&incoming);
        // Answered, so the silent one before it has its greeter.
        let mut scanner = connect(&incoming);
        scanner.write_all(b"none").unwrap();
        let _ = scanner.read(&mut [0]);
        drop(incoming);
        silent.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let end = silent.read(&mut [0]);
        assert!(matches!(end, Ok(0)) || end.as_ref().is_err_and(is_reset), "still there: {end:?}");
    });
}

fn is_reset(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::ConnectionReset
}

#[test]
fn flood_of_connections_is_turned_away() {
    case("flood", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        // More than may greet at once.
        let flood: Vec<_> = (0..330).map(|_| connect(&incoming)).collect();
        drop(flood);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let outcome = migration.wait();
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
    });
}

#[test]
fn channel_that_comes_twice_or_with_a_wrong_id_is_refused() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    let cases: [(&str, usize, usize, &[u8], &str); 5] = [
        ("twice", 1, 24, &[0], "twice"),
        ("id", 1, 24, &[2], "channel 2 of 2"),
        ("uuid", 1, 8, &[7], "UUID"),
        ("version", 1, 7, &[2], "version"),
        ("reserved", 1, 30, &[1], "reserved"),
    ];
    for (name, lane, at, bytes, words) in cases {
        case(name, || {
            let mut bad = good.clone();
            bad.lanes[lane][at..at + bytes.len()].copy_from_slice(bytes);
            let why = refused(&bad);
            assert!(why.to_string().contains(words), "{name}: {why}");
            assert!(why.fault().is_some());
        });
    }
}

#[test]
fn second_main_or_further_channel_is_refused() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    for extra in [&b"QEVM\0\0\0\x03\x07"[..], &good.lanes[0][..64]] {
        case("extra", || {
            let (params, capabilities) = settings(2);
            let (target, incoming) = waiting(&params, capabilities);
            let mut sent = Sent::default();
            let to = incoming.address();
            // The main channel stands before its end, so the migration is under way.
            sent.channel(&to, good.main[..good.find(FLUSH)].to_vec(), true);
            sent.channel(&to, good.lanes[0].clone(), true);
            sent.channel(&to, good.lanes[1].clone(), true);
            eventually("all channels", || incoming.status() == Status::Active);
            sent.channel(&to, extra.to_vec(), true);
            let why = failed(&incoming);
            drop(sent);
            assert_reset(&target);
            assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
        });
    }
}

#[test]
fn rounds_that_do_not_add_up_are_refused() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    let flush = good.find(FLUSH);
    let end = good.find(END);
    let last = good.main[..end].windows(8).rposition(|window| window == FLUSH).unwrap();
    let part = |from: usize| {
        let start = good.main[..from].windows(5).rposition(|w| w == [2, 0, 0, 0, 1]).unwrap();
        start..from + 8 + 8 + 5
    };

    // A SYNC that never comes: waited for, and named.
    case("SYNC missing", || {
        let mut bad = good.clone();
        let end = bad.lanes[1].len();
        bad.lanes[1].truncate(end - PACKET);
        let text = refused(&bad).to_string();
        assert!(text.contains("SYNC") && text.contains("channel 1"), "{text}");
    });
    case("lane ends before its SYNC", || {
        let mut bad = good.clone();
        let end = bad.lanes[1].len();
        bad.lanes[1].truncate(end - PACKET);
        let (params, capabilities) = settings(2);
        let (target, incoming) = waiting(&params, capabilities);
        let sent = bad.send(&incoming.address(), false);
        let why = failed(&incoming);
        drop(sent);
        assert_reset(&target);
        assert_eq!(why.fault(), Some(Fault::PeerMisbehaved), "{why}");
    });
    // One SYNC more than flushes: pages before it may have come or not, and nobody waited for them.
    case("flush missing at the end", || {
        let mut bad = good.clone();
        bad.main.drain(part(last));
        let device = bad.find(b"\x0dprocess-guest");
        let (params, capabilities) = common::multifd(2);
        let (target, incoming) = waiting(&params, capabilities);
        let mut sent = Sent::default();
        let to = incoming.address();
        for lane in &bad.lanes {
            sent.channel(&to, lane.clone(), true);
        }
        sent.channel_in_two(&to, bad.main.clone(), device);
        let why = failed(&incoming);
        drop(sent);
        assert_reset(&target);
        assert_eq!(why.fault(), Some(Fault::PeerMisbehaved), "{why}");
        assert!(why.to_string().contains("SYNC"), "{why}");
    });
    case("first flush missing", || {
        let mut bad = good.clone();
        bad.main.drain(flush..flush + 8);
        let why = refused(&bad);
        assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
        assert!(why.to_string().contains("MULTIFD_FLUSH"), "{why}");
    });
    case("page twice in a round", || {
        let mut bad = good.clone();
        let lane = bad.lanes.iter().position(|lane| lane.len() > 64 + 3 * PACKET).unwrap();
        let packet = &bad.lanes[lane][64 + PACKET..];
        let payload = u32::from_be_bytes(packet[20..24].try_into().unwrap()) as usize;
        let again = packet[..PACKET + payload].to_vec();
        bad.lanes[lane].splice(64 + PACKET..64 + PACKET, again);
        let why = refused(&bad);
        assert_eq!(why.fault(), Some(Fault::PeerMisbehaved), "{why}");
        assert!(why.to_string().contains("twice"), "{why}");
    });
}

#[test]
fn stream_of_an_old_machine_that_flushes_silently_arrives() {
    let good = case("recording", || Recording::take("pc-q35-8.0", 1));
    case("legacy", || {
        // As QEMU's machines up to 8.0 send it: every end of section is a flush, and none is written.
        let mut legacy = good.clone();
        loop {
            let ram = &legacy.main[..legacy.find(END)];
            let Some(at) = ram.windows(8).position(|window| window == FLUSH) else { break };
            legacy.main.drain(at..at + 8);
        }
        // END has its own, for which each lane writes a SYNC.
        let sync = legacy.lanes[0][64..64 + PACKET].to_vec();
        legacy.lanes[0].extend(sync);
        let (params, capabilities) = settings(1);
        let (_, target) = vms();
        target.is_machine("pc-q35-8.0");
        let incoming = vm::listen(&target, &params, capabilities);
        let sent = legacy.send(&incoming.address(), false);
        let arrival = incoming.wait();
        drop(sent);
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        assert!(target.guest.check().unwrap().is_consistent());
    });
}
