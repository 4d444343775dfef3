//! Streams that version 0.1 sent from one Sterna to another can be loaded by later versions (docs/compatibility.md).
//!
//! `STERNA_WRITE_GOLDEN=1 cargo test --workspace -p sterna --test leaks of_0_1 -- --ignored` records the streams. The
//! existing recordings are from 0.1 and must not change: record only a form that has no recording yet.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};

use sterna::{Arrival, Capabilities, Compression, Event, Observer, Outcome, Parameters};
use sterna_guests::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use crate::common;
use crate::support::bank::{Bank, Calls};
use crate::support::proxy::{Line, Proxy, Verdict, Way};
use crate::support::recording::Sent;
use crate::support::{TestVm, case, vm};

/// The guest in the recordings.
fn guest() -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 48 << 10), ("ram.high".into(), 16 << 10)],
        fill: Fill::Zero,
        working_set_pages: Some(2),
        ..common::config()
    }
}

fn machine(guest: Arc<ProcessGuest>, is_waiting: bool) -> Arc<TestVm> {
    let calls = Calls::default();
    let bank = Bank::new(0, 41, 3_000, 1_000, &calls);
    TestVm::with_banks(guest, vec![Arc::new(if is_waiting { bank.waiting(&calls) } else { bank })])
}

/// Each recorded form: name and settings.
fn forms() -> [(&'static str, Parameters, Capabilities); 4] {
    let (params, capabilities) = common::multifd(2);
    let with = |compression| Parameters { multifd_compression: compression, ..params.clone() };
    [
        ("main", params.clone(), Capabilities { multifd: false, ..capabilities }),
        ("multifd", params.clone(), capabilities),
        ("multifd-zlib", with(Compression::Zlib), capabilities),
        ("multifd-zstd", with(Compression::Zstd), capabilities),
    ]
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/of-0.1").join(format!("{name}.gz"))
}

#[test]
fn stream_of_0_1_is_loaded() {
    for (name, params, capabilities) in forms() {
        case(name, || {
            common::trace();
            let target = machine(ProcessGuest::waiting(guest()).expect("destination"), true);
            let (say, prepared) = mpsc::channel();
            let incoming =
                vm::listen_told(&target, &params, capabilities, when_prepared(move || say.send(()).unwrap()));
            let [until_prepared, rest, lanes @ ..] = &read(name)[..] else {
                panic!("{name} has no main channel")
            };
            let mut sent = Sent::default();
            let main = [&until_prepared[..], rest].concat();
            let go = sent.channel_in_parts(&incoming.address(), main, until_prepared.len());
            for lane in lanes {
                sent.channel(&incoming.address(), lane.clone(), true);
            }
            prepared
                .recv_timeout(common::LIMITS.switchover)
                .unwrap_or_else(|_| panic!("{name}: {:?}", incoming.status()));
            go.send(()).unwrap();

            let arrival = incoming.wait();

            assert!(matches!(arrival, Arrival::Completed(_)), "{name}: {arrival:?}");
            common::assert_lives_on(&target.guest);
            assert!(target.banks[0].runs(), "{name}");
        });
    }
}

#[test]
#[ignore = "writes what the test above reads"]
fn record() {
    assert!(
        std::env::var_os("STERNA_WRITE_GOLDEN").is_some(),
        "set STERNA_WRITE_GOLDEN=1 to write the streams"
    );
    for (name, params, capabilities) in forms().into_iter().filter(|(name, ..)| !file(name).exists()) {
        let (source, target) = common::pair(&guest());
        let (source, target) = (machine(source, false), machine(target, true));
        let incoming = vm::listen(&target, &params, capabilities);
        let channels = Arc::new(Mutex::new(BTreeMap::<u16, Vec<u8>>::new()));
        let seen = Arc::clone(&channels);
        let tap = move |line, way, _: u64, piece: &mut Vec<u8>| {
            let number = match line {
                Line::Main => 0,
                Line::Lane(id) => 1 + u16::from(id),
                Line::Other => panic!("an unknown channel"),
            };
            if way == Way::Forward {
                seen.lock().unwrap().entry(number).or_default().extend_from_slice(piece);
            }
            Verdict::Pass
        };
        let proxy = Proxy::new(&incoming.address(), Box::new(tap));
        let (until_prepared, at) = (Arc::new(Mutex::new(0)), Arc::clone(&channels));
        let length = Arc::clone(&until_prepared);
        let observer = when_prepared(move || *length.lock().unwrap() = at.lock().unwrap()[&0].len());
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, observer);
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        assert!(matches!((&outcome, &arrival), (Outcome::Completed, Arrival::Completed(_))), "{outcome:?}");
        drop(proxy);
        let mut channels = channels.lock().unwrap();
        let rest = channels.get_mut(&0).unwrap().split_off(*until_prepared.lock().unwrap());
        assert_eq!(rest.first(), Some(&0), "{name}: EOF follows the answer to PREPARE");
        let lanes = channels.range(1..).map(|(_, lane)| lane);
        write(name, [&channels[&0], &rest].into_iter().chain(lanes));
    }
}

/// Calls `act` when *prepare* is answered.
fn when_prepared(act: impl Fn() + Send + Sync + 'static) -> Arc<dyn Observer> {
    Arc::new(move |event: &Event| {
        if *event == Event::Prepared {
            act();
        }
    })
}

/// Writes a recording: the main channel up to the answer of *prepare*, the rest of the main channel, and the other
/// channels. Each part is its length (four bytes, big-endian), followed by its bytes.
fn write<'a>(name: &str, channels: impl Iterator<Item = &'a Vec<u8>>) {
    std::fs::create_dir_all(file(name).parent().unwrap()).unwrap();
    let file = std::fs::File::create(file(name)).unwrap();
    let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    for channel in channels {
        packed.write_all(&u32::try_from(channel.len()).unwrap().to_be_bytes()).unwrap();
        packed.write_all(channel).unwrap();
    }
    packed.finish().unwrap();
}

fn read(name: &str) -> Vec<Vec<u8>> {
    let file = std::fs::File::open(file(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    let (mut rest, mut channels) = (&bytes[..], Vec::new());
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let (channel, behind) = behind.split_at(u32::from_be_bytes(*length) as usize);
        channels.push(channel.to_vec());
        rest = behind;
    }
    channels
}
