//! A destination that answers wrongly, or like QEMU: the source's guest continues to run, or is handed over.

use crate::common;

use std::sync::Arc;

use crate::support;
use crate::support::destination::{HandMade, Reply, Seen, qemu, say, sterna as like_sterna};
use crate::support::{TestVm, case, eventually, vm, vms};
use sterna::{Capabilities, Fault, MigrationError, Outcome, Parameters, Status, Vm};
use sterna_wire::extension::{COMPATIBILITY_PING, EXTENSION_PING, FENCE_PING, PREPARE_PING};
use sterna_wire::main::Command;
use sterna_wire::return_path::ReturnMessage;

fn settings(channels: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(channels.max(1));
    capabilities.multifd = channels > 0;
    params.limits = support::short_limits();
    (params, capabilities)
}

/// Migrates to `peer`. The source must fail, and its guest must run. Returns the reason.
fn fails(peer: &HandMade) -> MigrationError {
    fails_at(peer, 0)
}

/// Like [`fails`], with that `max-bandwidth`.
fn fails_at(peer: &HandMade, max_bandwidth_bytes: u64) -> MigrationError {
    let (source, _) = vms();
    let (params, capabilities) = settings(1);
    let params = Parameters { max_bandwidth_bytes, ..params };
    let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
    eventually("the end", || migration.outcome().is_some());
    let outcome = migration.wait();
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    common::assert_lives_on(&source.guest);
    assert!(migration.may_guest_run());
    error
}

/// A peer like QEMU that sends `bytes` instead of its answer at one moment.
fn says_at(at: Seen, bytes: Vec<u8>) -> HandMade {
    let mut bytes = Some(bytes);
    HandMade::except(move |seen| if seen == at { bytes.take().map(Reply::Say) } else { None })
}

fn message(message: &ReturnMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes).unwrap();
    bytes
}

#[test]
fn answer_that_is_not_due_fails_with_the_peers_fault() {
    let early = Seen::RamStart;
    let request = ReturnMessage::RequestPages { block: Some("ram.low".into()), start: 0, length: 4096 };
    let cases: Vec<(&str, Seen, Vec<u8>, &str)> = vec![
        ("acknowledgement", early, message(&ReturnMessage::SwitchoverAck), ""),
        ("prepare", early, message(&ReturnMessage::Pong(PREPARE_PING)), "prepare"),
        ("SHUT 0 early", early, message(&ReturnMessage::Shut(0)), ""),
        ("SHUT 0 at prepare", Seen::Ping(PREPARE_PING), message(&ReturnMessage::Shut(0)), ""),
        ("page request", early, message(&request), "request for pages"),
        ("bitmap", early, message(&ReturnMessage::ReceivedBitmap { block: "ram.low".into() }), "Bitmap"),
        ("type 0", early, vec![0, 0, 0, 4, 0, 0, 0, 0], "type 0"),
        ("type 9", early, vec![0, 9, 0, 4, 0, 0, 0, 0], "type 9"),
        ("length", early, vec![0, 2, 0, 5, 0, 0, 0, 0, 0], "5 bytes"),
        ("long", early, vec![0, 1, 0xff, 0xff], "65535"),
        ("at once", Seen::ReturnPath, vec![0xff; 64], "type 65535"),
    ];
    for (name, at, bytes, words) in cases {
        case(name, || {
            // On a busy host, the thread that reads answers may otherwise not run before the guest is handed over.
            let max_bandwidth_bytes = if at == Seen::Ping(PREPARE_PING) { 0 } else { 2 << 20 };
            let error = fails_at(&says_at(at, bytes.clone()), max_bandwidth_bytes);
            assert_eq!(error.fault(), Some(Fault::PeerMisbehaved), "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains(words), "{name}: {words:?} is not in: {text}");
        });
    }
}

#[test]
fn wrong_message_is_named_with_its_byte() {
    case("byte", || {
        // Three PONGs of 8 bytes precede it.
        let error = fails(&says_at(Seen::RamStart, vec![0, 9, 0, 0]));
        let MigrationError::Wire { channel, error } = &error else { panic!("{error:?}") };
        assert_eq!((channel.as_str(), error.offset), ("return path", 24), "{error}");
    });
}

#[test]
fn refusal_of_the_destination_is_reported_as_such() {
    for at in [Seen::RamStart, Seen::Switchover, Seen::Ping(PREPARE_PING), Seen::Eof] {
        case(&format!("SHUT 1 at {at:?}"), || {
            let error = fails(&says_at(at, message(&ReturnMessage::Shut(1))));
            assert!(matches!(error, MigrationError::DestinationFailed(1)), "{error}");
        });
    }
}

#[test]
fn peer_that_closes_before_the_commit_leaves_the_guest() {
    for at in [
        Seen::ReturnPath,
        Seen::Ping(1),
        Seen::Ping(EXTENSION_PING),
        Seen::Ping(FENCE_PING),
        Seen::RamStart,
        Seen::Switchover,
        Seen::Ping(PREPARE_PING),
    ] {
        case(&format!("closes at {at:?}"), || {
            let error = fails(&HandMade::except(move |seen| (seen == at).then_some(Reply::Close)));
            assert!(matches!(error, MigrationError::Transport(_) | MigrationError::Ended(_)), "{error:?}");
        });
    }
}

#[test]
fn silent_peer_is_given_up_at_each_wait() {
    for silent in [FENCE_PING, COMPATIBILITY_PING, PREPARE_PING] {
        case(&format!("silent at {silent:#x}"), || {
            let peer = HandMade::new(Box::new(move |seen| match seen {
                Seen::Ping(value) if value == silent => Reply::Nothing,
                other => like_sterna(other),
            }));
            let error = fails(&peer);
            assert!(matches!(error, MigrationError::Limit { .. }), "{error:?}");
        });
    }
}

#[test]
fn harmless_answers_are_borne() {
    case("harmless", || {
        let (source, _) = vms();
        let mut odd = Vec::new();
        for value in [1, 0, u32::MAX, EXTENSION_PING, FENCE_PING, 0x5346_0001] {
            ReturnMessage::Pong(value).encode(&mut odd).unwrap();
        }
        // QEMU tolerates this in precopy, too.
        ReturnMessage::ResumeAck(1).encode(&mut odd).unwrap();
        let peer = says_at(Seen::RamStart, odd);
        let (params, capabilities) = settings(2);
        let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Completed));
        assert_eq!(migration.statistics().peer_is_sterna, Some(false));
    });
}

#[test]
fn acknowledgement_of_the_switchover_is_counted() {
    for (machine, acks, completes) in [
        ("pc-q35-11.0", 1, true),
        ("pc-q35-11.0", 2, false),
        ("pc-q35-11.1", 0, true),
        ("pc-q35-11.1", 1, false),
    ] {
        case(&format!("{machine}: {acks}"), || {
            let (source, _) = vms();
            source.is_machine(machine);
            let bytes = message(&ReturnMessage::SwitchoverAck).repeat(acks);
            let peer = says_at(Seen::ReturnPath, bytes);
            let (params, mut capabilities) = settings(1);
            capabilities.switchover_ack = true;
            let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
            let outcome = migration.wait();
            assert_eq!(matches!(outcome, Outcome::Completed), completes, "{outcome:?}");
            if !completes {
                common::assert_lives_on(&source.guest);
            }
        });
    }
}

/// All bytes that the source of a paused guest sends to `peer` on the main channel.
fn bytes_to(peer: &HandMade, source: &Arc<TestVm>, return_path: bool) -> Vec<u8> {
    source.guest.pause().unwrap();
    let (params, mut capabilities) = settings(0);
    capabilities.return_path = return_path;
    let migration = vm::start(source, &peer.address(), &params, capabilities, Arc::new(()));
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_eq!(migration.status(), Status::Completed);
    // A source without a return path may complete before the peer has read all bytes.
    eventually("the last byte", || peer.main().ends_with(b"}"));
    peer.main()
}

#[test]
fn qemu_gets_nothing_beyond_its_format_but_pings() {
    case("bytes", || {
        // The same guest is sent twice. It is paused, so the bytes are identical.
        let (source, _) = vms();
        let plain = bytes_to(&HandMade::like_qemu().without_multifd(), &source, false);
        source.ram().has_new_guest().expect("it has left");
        let probed = bytes_to(&HandMade::like_qemu().without_multifd(), &source, true);

        let mut expected = plain;
        let mut insert = |before: &[u8], commands: &[Command]| {
            let place = expected.windows(before.len()).position(|window| window == before).unwrap();
            let mut bytes = Vec::new();
            commands.iter().for_each(|command| command.encode(&mut bytes).unwrap());
            expected.splice(place..place, bytes);
        };
        insert(
            &[1, 0, 0, 0, 1, 3, b'r', b'a', b'm'],
            &[
                Command::OpenReturnPath,
                Command::Ping(1),
                Command::Ping(EXTENSION_PING),
                Command::Ping(FENCE_PING),
            ],
        );
        let end = expected.windows(15).position(|window| window == b"{\"configuration").unwrap() - 6;
        let mut prepare = Vec::new();
        Command::Ping(PREPARE_PING).encode(&mut prepare).unwrap();
        expected.splice(end..end, prepare);
        assert!(probed == expected, "{} bytes, expected {}", probed.len(), expected.len());
    });
}

#[test]
fn peer_that_cannot_answer_gets_a_guest_and_says_nothing() {
    for channels in [0, 2] {
        case("no return path", || {
            let (source, target) = vms();
            let (params, mut capabilities) = settings(channels);
            let incoming = vm::listen(&target, &params, capabilities);
            capabilities.return_path = false;
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            let (outcome, arrival) = (migration.wait(), incoming.wait());
            common::assert_arrived(&outcome, &arrival, &target.guest);
            assert_eq!(migration.statistics().peer_is_sterna, None);
        });
    }
}

#[test]
fn qemu_that_takes_a_running_guest_gets_all_of_it() {
    for channels in [0, 1, 3] {
        case("like QEMU", || {
            let (source, _) = vms();
            let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
            let log = Arc::clone(&seen);
            let peer = HandMade::new(Box::new(move |item| {
                log.lock().unwrap().push(item);
                qemu(item)
            }));
            let peer = if channels == 0 { peer.without_multifd() } else { peer };
            let (params, capabilities) = settings(channels);
            let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
            assert!(matches!(migration.wait(), Outcome::Completed));
            assert!(!migration.may_guest_run());
            let expected = [
                Seen::ReturnPath,
                Seen::Ping(1),
                Seen::Ping(EXTENSION_PING),
                Seen::Ping(FENCE_PING),
                Seen::RamStart,
                Seen::Switchover,
                Seen::Ping(PREPARE_PING),
                Seen::Eof,
                Seen::Description,
            ];
            assert_eq!(*seen.lock().unwrap(), expected);
        });
    }
}

#[test]
fn other_answer_than_a_pong_to_the_fence_is_refused() {
    case("fence", || {
        let peer = HandMade::except(|seen| match seen {
            Seen::Ping(FENCE_PING) => Some(say(&ReturnMessage::Shut(0))),
            _ => None,
        });
        assert_eq!(fails(&peer).fault(), Some(Fault::PeerMisbehaved));
    });
}
