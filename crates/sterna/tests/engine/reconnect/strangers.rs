//! Peers that claim to be a reconnecting source, and are not.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;
use crate::common::{assert_arrived, multifd};
use crate::support::{eventually, port, warnings};
use sterna_wire::extension::{MigrationSecret, ReconnectChannel, ReconnectHello};

/// Sends `hello` to the destination. Returns the answer up to the closing of the connection.
fn answer(incoming: &Incoming, hello: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", port(&incoming.address()))).unwrap();
    stream.write_all(hello).unwrap();
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    got
}

/// A slow migration, and the hellos of its sessions.
struct Recorded {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    _proxy: Proxy,
    migration: Migration,
    incoming: Incoming,
    warned: Arc<Log>,
    hellos: Arc<std::sync::Mutex<Vec<Vec<u8>>>>,
}

fn recorded() -> Recorded {
    let (params, capabilities) = surviving(multifd(1));
    let params = Parameters { max_bandwidth_bytes: 30 << 20, ..params };
    let (source, target) = common::pair(&config());
    let (source, target) = (TestVm::new(source), TestVm::new(target));
    let (told, warned) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let incoming = vm::listen_told(&target, &params, capabilities, warned.clone());
    let hellos = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut cut = after_bytes(3 << 20, (Line::Lane(0), Way::Forward), Verdict::Cut, 1);
    let keeps = Arc::clone(&hellos);
    let filter: Filter = Box::new(move |line, way, offset, piece| {
        if offset == 0 && way == Way::Forward && piece.starts_with(b"STNS") {
            keeps.lock().unwrap().push(piece[..ReconnectHello::BYTES].to_vec());
        }
        cut(line, way, offset, piece)
    });
    let proxy = Proxy::new(&incoming.address(), filter);
    let migration = vm::start(&source, &proxy.address(), &params, capabilities, told);
    eventually("the new session", || migration.statistics().reconnections.len() == 1);
    // The source reports this after it has sent its hellos. If a hello is sent again before the destination has read
    // it, the destination treats it as the first.
    let has_begun = |event: &Event| matches!(event, Event::Reconnected { .. });
    eventually("the new session there", || warned.events().iter().any(has_begun));
    Recorded { source, target, _proxy: proxy, migration, incoming, warned, hellos }
}

#[test]
fn stranger_gets_no_byte_and_changes_nothing() {
    let bench = recorded();
    let hello = bench.hellos.lock().unwrap()[0].clone();
    let (known, _) = ReconnectHello::decode(&hello).unwrap().unwrap();
    let forged = |id, secret: u8| {
        let secret = MigrationSecret::from_bytes([secret; MigrationSecret::BYTES]);
        let hello = ReconnectHello::new(id, (99, ReconnectChannel::Main), [1; 16], &secret, &None);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        bytes
    };
    let mut of_another_session = hello.clone();
    of_another_session[27] += 7;
    let mut of_another_version = hello.clone();
    of_another_version[7] = 9;
    let (mut a_lane, mut farewell) = (hello.clone(), hello.clone());
    a_lane[31] = 1;
    farewell[28..32].fill(0xff);
    for (bytes, why) in [
        (forged(known.migration_id, 5), "no proof"),
        (forged([7; 16], 5), "whose secret this side does not know"),
        (of_another_session, "no proof"),
        (a_lane, "no proof"),
        (farewell, "no proof"),
        (of_another_version, "version 9"),
        // The same bytes that were accepted before: a repeated or delayed connection.
        (hello, "has an old number"),
    ] {
        let before = warnings(&bench.warned.events()).len();
        assert_eq!(answer(&bench.incoming, &bytes), b"", "{why}");
        let told = || warnings(&bench.warned.events())[before..].iter().any(|text| text.contains(why));
        eventually(why, told);
    }
    bench.migration.set_live(|params| params.max_bandwidth_bytes = 0).unwrap();
    let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());
    assert_arrived(&outcome, &arrival, &bench.target.guest);
    assert_eq!(bench.migration.statistics().reconnections.len(), 1, "nobody ended the session");
    assert!(!bench.source.guest.has_guest() || !bench.migration.may_guest_run());
}

#[test]
fn recorded_lane_of_an_old_session_is_refused() {
    let bench = recorded();
    let is_lane = |hello: &&Vec<u8>| hello[28..32] == [0, 0, 0, 1];
    let lane = bench.hellos.lock().unwrap().iter().rfind(is_lane).expect("the lane").clone();
    assert_eq!(answer(&bench.incoming, &lane), b"");
    let why = "of a session that is not about to begin";
    eventually(why, || warnings(&bench.warned.events()).iter().any(|text| text.contains(why)));
    bench.migration.set_live(|params| params.max_bandwidth_bytes = 0).unwrap();
    let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());
    assert_arrived(&outcome, &arrival, &bench.target.guest);
    assert_eq!(bench.migration.statistics().reconnections.len(), 1);
}
