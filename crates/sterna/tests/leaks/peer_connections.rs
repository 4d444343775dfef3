//! Unexpected connections, missing connections, and rounds whose SYNCs and flushes do not match.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use crate::support;
use crate::support::recording::{Recording, Sent};
use crate::support::{
    assert_failed, assert_next_works, assert_reset, case, eventually, has_warning, port, vm, vms, waiting,
    warnings,
};
use sterna::error::{Awaited, BadPage, BadRound, Difference, Misbehaviour};
use sterna::{Arrival, Capabilities, Fault, Incoming, MigrationError, Outcome, Parameters, Status, Vm};

const MACHINE: &str = "sterna-process";
const FLUSH: &[u8] = &[0, 0, 0, 0, 0, 0, 2, 0];
/// RAM's END section without pages.
const END: &[u8] = &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x10];
const PACKET: usize = 1344;
/// The paragraph about MULTIFD_FLUSH.
const FLUSHES: &str = "specs/stream.md §3.5";

fn settings(lanes: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    params.limits = support::short_limits();
    (params, capabilities)
}

fn failed(incoming: &Incoming) -> MigrationError {
    eventually("the end", || incoming.status().is_terminal());
    let arrival = incoming.wait();
    let Arrival::Failed(why) = arrival else { panic!("{arrival:?}") };
    why
}

/// Sends `recording` to a destination of two lanes, which must refuse it.
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

/// Migrates with different settings on the two sides. Both must fail.
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
            // The decoder of the first packet knows its own sides' numbers of channels.
            let is_number = match &why {
                MigrationError::PeerIncompatible(Difference::RefusedLane { .. }) => true,
                MigrationError::Wire { error, .. } => {
                    error.message == "multifd initial packet" || error.paragraph == FLUSHES
                }
                _ => false,
            };
            assert!(is_number, "{why:?}");
        });
    }
}

#[test]
fn missing_channel_is_waited_for_only_so_long() {
    for ours in [0, 1] {
        case(&format!("{ours} to 2"), || {
            let (source, target) = vms();
            let ((params, capabilities), (theirs, expected)) = (settings(ours), settings(2));
            let log = Arc::new(common::Log::default());
            let incoming = vm::listen_told(&target, &theirs, expected, Arc::clone(&log) as _);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            eventually("the source's end", || migration.outcome().is_some());
            assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
            common::assert_lives_on(&source.guest);
            let words = ["multifd channel 1 did not connect", "the same number of channels"];
            eventually("what is missing", || has_warning(&log.events(), &words));
            assert_eq!(incoming.status(), Status::Setup, "the next one may come");
            drop(incoming);
            assert_next_works(&source, &target);
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
            // The destination may have rejected it already.
            let _ = scanner.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = scanner.read_to_end(&mut answer);
            assert_eq!(answer, b"");
        }
        assert_eq!(incoming.status(), Status::Setup);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        // Dropping the last handle closes all connections, including those that have sent nothing.
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
        // This connection is answered, so a greeter has already accepted the silent one before it.
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
fn flood_of_connections_leaves_room_for_a_migration() {
    case("flood", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        // More connections than may be greeted at the same time.
        let flood: Vec<_> = (0..330).map(|_| connect(&incoming)).collect();
        drop(flood);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let outcome = migration.wait();
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
    });
}

#[test]
fn flood_of_connections_that_speak_leaves_room_for_a_migration() {
    case("talkative", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        // More connections than may be greeted at the same time. All send the beginning of a main channel, and then
        // wait.
        let flood: Vec<_> = (0..330)
            .map(|_| {
                let mut stranger = connect(&incoming);
                // The first connections may have been rejected by now.
                let _ = stranger.write_all(b"QEVM");
                stranger
            })
            .collect();
        // The connections must be accepted before the source's. If some are not, this run proves less.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
        drop(flood);
    });
}

/// A destination of two lanes, and the log of its warnings.
fn listening() -> (Arc<support::TestVm>, Incoming, Arc<common::Log>) {
    let (params, capabilities) = settings(2);
    let guest = sterna_guests::process::ProcessGuest::waiting(support::small()).unwrap();
    let target = support::TestVm::new(guest);
    let log = Arc::new(common::Log::default());
    let incoming = vm::listen_told(&target, &params, capabilities, Arc::clone(&log) as _);
    (target, incoming, log)
}

fn assert_told(log: &common::Log, words: &str) {
    eventually(words, || warnings(&log.events()).iter().any(|text| text.contains(words)));
}

/// Asserts that the guest arrives, whatever other connections have sent.
fn assert_arrives(incoming: &Incoming, target: &support::TestVm) {
    eventually("the end", || incoming.status().is_terminal());
    let arrival = incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
    assert!(target.guest.check().unwrap().is_consistent());
}

#[test]
fn multifd_hello_that_does_not_fit_is_turned_away_and_takes_no_place() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    let cases: [(&str, usize, &[u8], &str); 4] = [
        ("id", 24, &[2], "channel 2 of 2"),
        ("uuid", 8, &[7], "UUID"),
        ("version", 7, &[2], "version"),
        ("reserved", 30, &[1], "reserved"),
    ];
    for (name, at, bytes, words) in cases {
        case(name, || {
            let (target, incoming, log) = listening();
            let mut stranger = Sent::default();
            let mut hello = good.lanes[1][..64].to_vec();
            hello[at..at + bytes.len()].copy_from_slice(bytes);
            stranger.channel(&incoming.address(), hello, true);
            assert_told(&log, words);
            let sent = good.send(&incoming.address(), false);
            assert_arrives(&incoming, &target);
            drop((sent, stranger));
        });
    }
}

#[test]
fn strangers_that_come_first_keep_no_channel_out() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    // A connection that sends a complete configuration and stays open cannot be distinguished from a source: see
    // `places::tests`.
    let strangers: [(&str, Vec<u8>, &[bool]); 5] = [
        ("the magic alone", b"QEVM".to_vec(), &[false, true]),
        ("a header", good.main[..8].to_vec(), &[false, true]),
        ("a whole configuration", good.main[..28].to_vec(), &[true]),
        ("an initial packet", good.lanes[0][..64].to_vec(), &[false, true]),
        ("half an initial packet", good.lanes[1][..30].to_vec(), &[false, true]),
    ];
    for (name, bytes, closing) in &strangers {
        for &then_closes in *closing {
            case(name, || {
                let (target, incoming, _log) = listening();
                let mut stranger = Sent::default();
                for _ in 0..3 {
                    stranger.channel(&incoming.address(), bytes.clone(), !then_closes);
                }
                // A connection that has sent a complete configuration and is still open would count as the source.
                stranger.wait();
                std::thread::sleep(std::time::Duration::from_millis(50));
                let sent = good.send(&incoming.address(), true);
                assert_arrives(&incoming, &target);
                drop((sent, stranger));
            });
        }
    }
}

#[test]
fn main_channels_that_were_given_up_do_not_stand_for_one_that_is_slow() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    case("given up", || {
        let (params, capabilities) = common::multifd(2);
        let (target, incoming) = waiting(&params, capabilities);
        let to = incoming.address();
        for _ in 0..3 {
            let mut given_up = connect(&incoming);
            given_up.write_all(&good.main[..40]).unwrap();
        }
        let mut sent = Sent::default();
        let main = sent.channel_in_parts(&to, good.main.clone(), 0);
        for lane in &good.lanes {
            sent.channel(&to, lane.clone(), true);
        }
        // Longer than the destination waits when all missing bytes may have arrived.
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert_eq!(incoming.status(), Status::Setup);
        main.send(()).unwrap();
        assert_arrives(&incoming, &target);
        drop(sent);
    });
}

#[test]
fn inherited_connection_that_nobody_can_greet_ends_the_waiting() {
    case("no greeter", || {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let at = sterna::Address::Handed(sterna::HandedFd::new(ours.into(), "socket"));
        let (params, capabilities) = settings(0);
        let guest = sterna_guests::process::ProcessGuest::waiting(support::small()).unwrap();
        let target = support::TestVm::new(guest);
        sterna::refuse_threads(Some("greeter"));
        let listening = Incoming::listen(target.clone(), &at, params, capabilities, Arc::new(()));
        sterna::refuse_threads(None);
        let why = failed(&listening.unwrap());
        assert!(matches!(&why, MigrationError::System(..)), "{why:?}");
        assert_reset(&target);
    });
}

#[test]
fn listener_that_dies_before_a_migration_ends_the_waiting() {
    case("listener", || {
        let (params, capabilities) = settings(2);
        let guest = sterna_guests::process::ProcessGuest::waiting(support::small()).unwrap();
        let target = support::TestVm::new(guest);
        sterna::refuse_threads(Some("listener, begun"));
        let incoming = vm::listen(&target, &params, capabilities);
        sterna::refuse_threads(None);
        let why = failed(&incoming);
        let MigrationError::Panicked { message, .. } = &why else { panic!("{why:?}") };
        assert_eq!(message, "told to die");
        assert_eq!(target.ram().custody(), sterna::ram::Custody::Free);
    });
}

#[test]
fn strangers_alone_do_not_end_the_waiting() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    for bytes in [b"QEVM".to_vec(), good.main[..40].to_vec(), good.lanes[0][..64].to_vec()] {
        case("alone", || {
            let (target, incoming, log) = listening();
            let mut stranger = Sent::default();
            stranger.channel(&incoming.address(), bytes.clone(), true);
            assert_told(&log, "refused");
            assert_eq!(incoming.status(), Status::Setup);
            let sent = good.send(&incoming.address(), false);
            assert_arrives(&incoming, &target);
            drop((sent, stranger));
        });
    }
}

#[test]
fn inherited_connection_that_does_not_fit_ends_the_waiting_with_the_reason() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    for (bytes, words) in [
        (b"GET / HTTP/1.0\r\n".to_vec(), "do not begin a migration channel"),
        (good.main[..8].to_vec(), "closed"),
    ] {
        case(words, || {
            let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            let at = sterna::Address::Handed(sterna::HandedFd::new(ours.into(), "socket"));
            let (params, capabilities) = settings(0);
            let guest = sterna_guests::process::ProcessGuest::waiting(support::small()).unwrap();
            let target = support::TestVm::new(guest);
            let incoming = Incoming::listen(target.clone(), &at, params, capabilities, Arc::new(())).unwrap();
            theirs.write_all(&bytes).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            let why = failed(&incoming).to_string();
            assert!(why.contains(words), "{why}");
            assert_reset(&target);
        });
    }
}

#[test]
fn strangers_leave_a_running_migration_alone() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    let mut unknown = good.lanes[0][..64].to_vec();
    unknown[24] = 9;
    let strangers: [(&[u8], &str); 5] = [
        (b"QEVM", "did not identify itself in time"),
        (&good.main[..40], "the main channel, which is connected already"),
        (&good.lanes[0][..64], "multifd channel 0, which is connected already"),
        (&unknown, "channel 9 of 2"),
        (b"GET / HTTP/1.0", "do not begin a migration channel"),
    ];
    for (extra, words) in strangers {
        case("extra", || {
            let (target, incoming, log) = listening();
            let mut sent = Sent::default();
            let to = incoming.address();
            for lane in &good.lanes {
                sent.channel(&to, lane.clone(), true);
            }
            // The rest of the main channel, after the stranger was rejected.
            let half = good.find(FLUSH);
            let rest = sent.channel_in_parts(&to, good.main.clone(), half);
            eventually("all channels", || incoming.status() == Status::Active);
            eventually("lanes", || incoming.statistics().received_bytes > 0);
            let mut stranger = Sent::default();
            stranger.channel(&to, extra.to_vec(), true);
            if words != "did not identify itself in time" {
                assert_told(&log, words);
            }
            assert!(!incoming.status().is_terminal());
            rest.send(()).unwrap();
            assert_arrives(&incoming, &target);
            drop((sent, stranger));
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

    // The destination waits for a SYNC that does not arrive, and names it in the error.
    case("SYNC missing", || {
        let mut bad = good.clone();
        let end = bad.lanes[1].len();
        bad.lanes[1].truncate(end - PACKET);
        let why = refused(&bad);
        let MigrationError::Limit { what, .. } = &why else { panic!("{why}") };
        assert!(matches!(what, Awaited::Sync { channel: 1, .. }), "{why}");
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
        let MigrationError::PeerMisbehaved(Misbehaviour::Round(round)) = &why else { panic!("{why}") };
        assert!(matches!(round, BadRound::NoSync { channel: 1, .. }), "{why}");
    });
    // There is one SYNC more than flushes: pages before it may or may not have arrived, and the destination did not
    // wait for them.
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
        let MigrationError::PeerMisbehaved(Misbehaviour::Round(round)) = &why else { panic!("{why}") };
        assert!(matches!(round, BadRound::PacketsAfterFlush { .. }), "{why}");
    });
    case("first flush missing", || {
        let mut bad = good.clone();
        bad.main.drain(flush..flush + 8);
        let why = refused(&bad);
        assert_eq!(why.fault(), Some(Fault::PeerIncompatible), "{why}");
        let MigrationError::Wire { error, .. } = &why else { panic!("{why:?}") };
        assert_eq!(error.paragraph, FLUSHES, "{why}");
    });
    case("page twice in a round", || {
        let mut bad = good.clone();
        let lane = bad.lanes.iter().position(|lane| lane.len() > 64 + 3 * PACKET).unwrap();
        let packet = &bad.lanes[lane][64 + PACKET..];
        let payload = u32::from_be_bytes(packet[20..24].try_into().unwrap()) as usize;
        let again = packet[..PACKET + payload].to_vec();
        bad.lanes[lane].splice(64 + PACKET..64 + PACKET, again);
        let why = refused(&bad);
        let MigrationError::PeerMisbehaved(Misbehaviour::Page(page)) = &why else { panic!("{why}") };
        assert!(matches!(page, BadPage::TwiceInRound { .. }), "{why}");
    });
}

#[test]
fn stream_of_an_old_machine_that_flushes_silently_arrives() {
    let good = case("recording", || Recording::take("pc-q35-8.0", 1));
    case("legacy", || {
        // As QEMU's machine types up to 8.0 send it: every end of section is an implicit flush.
        let mut legacy = good.clone();
        loop {
            let ram = &legacy.main[..legacy.find(END)];
            let Some(at) = ram.windows(8).position(|window| window == FLUSH) else { break };
            legacy.main.drain(at..at + 8);
        }
        // END is also a flush, for which each lane writes a SYNC.
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
