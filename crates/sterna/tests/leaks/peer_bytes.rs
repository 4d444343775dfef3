//! A source that sends wrong bytes: the error names the channel, the byte, the rule and the side at fault.

use crate::common;

use crate::support;
use crate::support::recording::Recording;
use crate::support::{assert_reset, case, eventually, waiting};
use sterna::error::Ending;
use sterna::{Arrival, Capabilities, Fault, MigrationError, Parameters, Status};

const MACHINE: &str = "sterna-process";
const FLUSH: &[u8] = &[0, 0, 0, 0, 0, 0, 2, 0];
const PACKET: usize = 1344;

fn settings(lanes: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    params.limits = support::short_limits();
    (params, capabilities)
}

/// Sends the recording to a new destination, which must refuse it. Returns the reason.
fn refused(recording: &Recording, open: bool) -> MigrationError {
    let (params, capabilities) = settings(recording.lanes.len() as u8);
    refused_with(recording, open, &params, capabilities)
}

fn refused_with(
    recording: &Recording,
    open: bool,
    params: &Parameters,
    capabilities: Capabilities,
) -> MigrationError {
    let (target, incoming) = waiting(params, capabilities);
    let sent = recording.send(&incoming.address(), open);
    eventually("the end", || incoming.status().is_terminal());
    let arrival = incoming.wait();
    drop(sent);
    assert_reset(&target);
    assert_eq!(*target.starts.lock().unwrap(), 0);
    let Arrival::Failed(why) = arrival else { panic!("{arrival:?}") };
    assert_eq!(incoming.statistics().error, Some(why.to_string()));
    why
}

fn assert_wire(why: &MigrationError, channel: &str, byte: u64, words: &str, fault: Fault) {
    let MigrationError::Wire { channel: on, error } = why else { panic!("{why:?}") };
    let text = why.to_string();
    assert_eq!(on, channel, "{text}");
    assert_eq!(error.offset, byte, "{text}");
    assert_eq!(error.fault, fault, "{text}");
    assert!(text.contains(words), "{words:?} is not in: {text}");
}

#[test]
fn recording_arrives_as_it_is() {
    for lanes in [0, 2] {
        let mut recording = case("recording", || Recording::take(MACHINE, lanes));
        for answers in [false, true] {
            case("replay", || {
                if answers {
                    recording = recording.clone().with_return_path();
                }
                let (params, capabilities) = settings(lanes);
                let (target, incoming) = waiting(&params, capabilities);
                let mut sent = recording.send(&incoming.address(), answers);
                let arrival = incoming.wait();
                assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
                let shut: &[u8] = if answers { &[0, 1, 0, 4, 0, 0, 0, 0] } else { &[] };
                assert_eq!(sent.returned(), shut);
                assert!(target.guest.check().unwrap().is_consistent());
                target.guest.cont().unwrap();
                common::assert_lives_on(&target.guest);
            });
        }
    }
}

#[test]
fn wrong_byte_of_the_main_channel_is_named() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    let block = good.find(b"\x07ram.low");
    let page = good.find(b"\x00\x08\x07ram.low");
    let footer = good.find(&[0x7e, 0, 0, 0, 1]);
    let device = good.find(b"\x0dprocess-guest");
    let end = good.find(b"{\"configuration\"") - 6;
    let total = block - 8;
    use Fault::{PeerIncompatible as Unfit, PeerMisbehaved as Bad};
    let cases: &[(usize, &[u8], u64, &str, Fault)] = &[
        (block + 1, b"rom.low", block as u64, "rom.low", Unfit),
        (block + 8, &[0, 0, 0, 0, 0, 0x2f, 0xf0, 0], block as u64, "ram.low", Unfit),
        (total + 7, &[0x14], total as u64, "block list", Bad),
        (page + 2, b"\x07ram.lox", 0, "ram.lox", Bad),
        (page - 6, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff], page as u64 - 6, "", Bad),
        (footer, &[0x7f], footer as u64, "footer", Bad),
        (footer + 4, &[9], footer as u64 + 1, "footer", Bad),
        (device + 1, b"qrocess-guest", device as u64 - 5, "qrocess-guest", Unfit),
        (device + 18, &[0, 0, 0, 9], device as u64 - 5, "version", Unfit),
        (device + 22, &[0xff, 0xff, 0xff, 0xff], device as u64 + 22, "", Bad),
        (end, &[0x55], end as u64, "no element starts with 55", Bad),
    ];
    for (at, bytes, byte, words, fault) in cases {
        case(&format!("byte {at}"), || {
            let mut bad = good.clone();
            bad.main[*at..at + bytes.len()].copy_from_slice(bytes);
            let why = refused(&bad, true);
            // The decoder decides which byte of a longer field it reports.
            let near = match &why {
                MigrationError::Wire { error, .. } => error.offset,
                other => panic!("{other:?}"),
            };
            assert!(near.abs_diff(*at as u64) <= 40, "{at}: {why}");
            let _ = byte;
            assert_wire(&why, "main channel", near, words, *fault);
        });
    }
}

#[test]
fn wrong_header_or_configuration_is_turned_away_with_the_reason_and_the_migration_goes_on() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    let cases: &[(&str, usize, &[u8], &str)] = &[
        ("version", 7, &[4], "version"),
        ("configuration", 8, &[6], "configuration"),
        ("machine", 13, b"Sterna-process", "machine"),
        ("no element behind it", 27, &[0x77], "77"),
    ];
    for (name, at, bytes, words) in cases {
        case(name, || {
            let (params, capabilities) = settings(0);
            let log = std::sync::Arc::new(common::Log::default());
            let guest = sterna_guests::process::ProcessGuest::waiting(support::small()).unwrap();
            let target = support::TestVm::new(guest);
            let incoming = support::vm::listen_told(&target, &params, capabilities, log.clone());
            let mut bad = good.clone();
            bad.main[*at..at + bytes.len()].copy_from_slice(bytes);
            let sent = bad.send(&incoming.address(), true);
            eventually(words, || support::has_warning(&log.events(), &["main channel", words]));
            drop(sent);
            assert_eq!(incoming.status(), Status::Setup);
            drop(good.send(&incoming.address(), false).returned());
            assert!(matches!(incoming.wait(), Arrival::Completed(_)));
            assert!(target.guest.check().unwrap().is_consistent());
        });
    }
}

#[test]
fn wrong_first_bytes_are_turned_away_and_the_migration_goes_on() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    case("magic", || {
        let (params, capabilities) = settings(0);
        let (target, incoming) = waiting(&params, capabilities);
        let mut bad = good.clone();
        bad.main[0] = b'X';
        let mut sent = bad.send(&incoming.address(), true);
        assert_eq!(sent.returned(), b"");
        assert_eq!(incoming.status(), Status::Setup);
        drop(good.send(&incoming.address(), false).returned());
        assert!(matches!(incoming.wait(), Arrival::Completed(_)));
        assert!(target.guest.check().unwrap().is_consistent());
    });
}

#[test]
fn stream_that_ends_early_is_refused_at_its_end() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    let end = good.find(b"{\"configuration\"") - 6;
    for at in [40, 1_000, 70_000, end - 1, end] {
        case(&format!("ends at {at}"), || {
            let mut bad = good.clone();
            bad.main.truncate(at);
            let why = refused(&bad, false);
            let ends = match &why {
                MigrationError::Ended(Ending::EarlyEnd { offset, .. }) => *offset == at as u64,
                MigrationError::Ended(Ending::InsidePage { offset }) => *offset < at as u64,
                _ => false,
            };
            assert!(ends, "{at}: {why}");
        });
    }
    // The description after EOF may be missing or cut off.
    for at in [end + 1, end + 3, end + 30] {
        case(&format!("ends at {at}"), || {
            let mut short = good.clone();
            short.main.truncate(at);
            let (params, capabilities) = settings(0);
            let (_target, incoming) = waiting(&params, capabilities);
            let sent = short.send(&incoming.address(), false);
            assert!(matches!(incoming.wait(), Arrival::Completed(_)));
            drop(sent);
        });
    }
}

#[test]
fn stray_elements_are_refused_by_name() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    let ram = good.find(&[1, 0, 0, 0, 1, 3, b'r', b'a', b'm']);
    let part = good.find(&[0x7e, 0, 0, 0, 1]) + 5;
    let eos = good.find_after(ram, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e]);
    let device = good.find(b"\x0dprocess-guest") - 5;
    let whole = good.main[device..good.find_after(device, &[0x7e]) + 5].to_vec();
    let cases: &[(&str, usize, &[u8], &str, Fault)] = &[
        ("PING too early", ram, &[8, 0, 2, 0, 4, 0, 0, 0, 1], "PING before", Fault::PeerMisbehaved),
        ("unknown command", ram, &[8, 0, 99, 0, 0], "99", Fault::PeerMisbehaved),
        ("postcopy", ram, &[8, 0, 4, 0, 0], "postcopy", Fault::PeerIncompatible),
        ("flush without multifd", eos, FLUSH, "MULTIFD_FLUSH", Fault::PeerIncompatible),
        ("two blocks lists", part, &good.main[ram..part], "", Fault::PeerMisbehaved),
        ("second EOF", part, &[0], "EOF before", Fault::PeerMisbehaved),
        ("footer alone", part, &[0x7e, 0, 0, 0, 1], "7e", Fault::PeerMisbehaved),
        ("device twice", device, &whole, "", Fault::PeerMisbehaved),
    ];
    for (name, at, bytes, words, fault) in cases {
        case(name, || {
            let mut bad = good.clone();
            bad.insert(*at, bytes);
            let why = refused(&bad, true);
            assert_eq!(why.fault(), Some(*fault), "{name}: {why}");
            assert!(why.to_string().contains(words), "{name}: {why}");
        });
    }
}

#[test]
fn garbage_behind_the_header_never_gets_further_than_an_error() {
    let good = case("recording", || Recording::take(MACHINE, 0));
    let mut random = sterna_testing::random("garbage_behind_the_header");
    for round in 0..30 {
        case(&format!("garbage {round}"), || {
            let mut bad = good.clone();
            let from = [40, 200, 3_000][random.u64(..3) as usize];
            for byte in &mut bad.main[from..] {
                *byte = random.u64(..256) as u8;
            }
            let why = refused(&bad, false);
            assert!(why.fault().is_some(), "{why}");
        });
    }
}

#[test]
fn packet_that_is_wrong_is_named() {
    let good = case("recording", || Recording::take(MACHINE, 2));
    let first = 64 + PACKET;
    // Lanes share the pages by timing, so a lane may have sent none.
    let has_pages = |lane: &Vec<u8>| lane.get(first + 19).is_some_and(|&normal| normal > 0);
    let lane = good.lanes.iter().position(has_pages).expect("a lane with pages");
    let cases: &[(&str, usize, &[u8], &str)] = &[
        ("magic", first, &[0x12], "magic"),
        ("version", first + 7, &[2], "version"),
        ("flags", first + 8, &[1, 0, 0, 0], "flag"),
        ("method", first + 11, &[2], ""),
        ("pages_alloc", first + 12, &[0, 0, 1, 0], ""),
        ("normal", first + 16, &[0, 0, 0, 200], ""),
        ("length", first + 20, &[0, 0x7f, 0, 0], ""),
        ("zero", first + 32, &[0, 0, 0, 200], ""),
        ("block", first + 64, b"rom", "rom"),
        ("offset", first + 320, &[0xff; 8], ""),
        ("alignment", first + 327, &[1], ""),
    ];
    for (name, at, bytes, words) in cases {
        case(name, || {
            let mut bad = good.clone();
            bad.lanes[lane][*at..at + bytes.len()].copy_from_slice(bytes);
            let why = refused(&bad, true);
            let MigrationError::Wire { channel, error } = &why else { panic!("{name}: {why:?}") };
            assert_eq!(*channel, format!("multifd channel {lane}"), "{why}");
            assert!(error.offset.abs_diff(*at as u64) <= 320, "{name} at {at}: {why}");
            assert!(why.to_string().contains(words), "{name}: {why}");
        });
    }
}
