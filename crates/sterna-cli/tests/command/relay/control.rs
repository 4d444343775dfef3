//! The control of a running relay: monitor, `sterna info`, limit, metrics, records.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};

use super::{connect, pair};
use crate::exposition;

fn client(socket: &str) -> Client {
    let endpoint: Endpoint = socket.parse().unwrap();
    Client::connect(&endpoint, Duration::from_secs(60)).unwrap()
}

fn run(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_done() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for an event with this name, and returns its data.
fn event(client: &mut Client, name: &str) -> Value {
    loop {
        let event = client.next_event(Duration::from_secs(60)).unwrap().expect(name);
        if event.name == name {
            return event.data;
        }
    }
}

#[test]
fn relay_shows_its_sessions_and_ends_one_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("qmp").display());
    let (dialer, _acceptor, target) = pair(directory.path(), &["--qmp", &socket, "--limit", "400MB/s"], &[]);
    let mut client = client(&socket);
    let relay = client.execute("query-relay", json!({})).unwrap();
    assert_eq!((&relay["limit"], &relay["sessions"]), (&json!(400_000_000), &json!([])));

    let (mut source, mut target) = connect(directory.path(), &target);
    source.write_all(&[7; 5000]).unwrap();
    target.read_exact(&mut [0; 5000]).unwrap();

    let opened = event(&mut client, "RELAY_SESSION_OPENED");
    assert_eq!(opened["route"], "web1");
    let relay = client.execute("query-relay", json!({})).unwrap();
    let session = &relay["sessions"][0];
    assert_eq!((&session["session"], &session["role"]), (&opened["session"], &json!("source")));
    assert_eq!((&session["processed-bytes"], &session["phase"]), (&json!(5000), &json!("none")));

    client.execute("set-relay-limit", json!({"limit": 12_000_000})).unwrap();
    assert!(client.execute("set-relay-limit", json!({"limit": -1})).is_err());
    let text = run(&["info", &socket]);
    let id = opened["session"].as_str().unwrap();
    for row in [&format!("session      {id}, route web1, relay of the source"), "limit        11.4 MiB/s"] {
        assert!(text.contains(row), "{row} is not in {text}");
    }
    let info: Value = serde_json::from_str(&run(&["info", &socket, "--json"])).unwrap();
    assert_eq!((&info["schema"], &info["limit"]), (&json!("sterna-relay-info"), &json!(12_000_000)));

    assert!(client.execute("end-relay-session", json!({"session": "0011223344556677"})).is_err());
    client.execute("end-relay-session", json!({"session": id})).unwrap();
    let ended = event(&mut client, "RELAY_SESSION_ENDED");
    assert_eq!((&ended["in-order"], &ended["figures"]["processed-bytes"]), (&json!(false), &json!(5000)));
    assert!(!matches!(source.read(&mut [0; 1]), Ok(1..)), "closed");

    client.execute("quit", json!({})).unwrap();
    let (status, said) = dialer.end();
    assert_eq!(status, Some(0), "{said}");
}

#[test]
fn metrics_of_a_relay_are_what_a_strict_parser_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let (dialer, acceptor, target) =
        pair(directory.path(), &["--metrics", "127.0.0.1:0"], &["--metrics", "127.0.0.1:0"]);
    let empty = exposition::fetch(dialer.metrics());
    assert_eq!(empty.value("sterna_relay_sessions", &[]), Some(0.0));
    assert_eq!(empty.value("sterna_relay_sessions_ended_total", &[("result", "broken")]), Some(0.0));

    let (mut source, mut ours) = connect(directory.path(), &target);
    source.write_all(&[1; 70_000]).unwrap();
    ours.read_exact(&mut [0; 70_000]).unwrap();

    for (relay, role) in [(&dialer, "source"), (&acceptor, "destination")] {
        let of = [("role", role), ("route", "web1")];
        // The destination counts a byte when its VMM's connection has taken it.
        until("the bytes", || {
            exposition::fetch(relay.metrics()).value("sterna_migration_data_processed_bytes", &of)
                == Some(70_000.0)
        });
        let page = exposition::fetch(relay.metrics());
        for name in [
            "sterna_migration_transfer_rate_bytes",
            "sterna_migration_round",
            "sterna_migration_compression_ratio",
            "sterna_migration_resent_bytes_total",
            "sterna_migration_reconnections_total",
            "sterna_migration_age_seconds",
        ] {
            assert!(page.value(name, &of).is_some(), "{name} is not in {:?}", page.names());
        }
        let phase = |phase| page.value("sterna_migration_phase", &[("role", role), ("phase", phase)]);
        assert_eq!((phase("none"), phase("ram")), (Some(1.0), Some(0.0)));
        // The second one may still be in its greeting.
        until("both carriers", || {
            exposition::fetch(relay.metrics()).value("sterna_migration_carriers", &of) == Some(2.0)
        });
    }
    [&source, &ours].into_iter().for_each(|end| end.shutdown(Shutdown::Both).unwrap());
    // The figures of a session that has ended stay for a while.
    until("the end", || {
        let page = exposition::fetch(dialer.metrics());
        page.value("sterna_migration_status", &[("status", "over")]) == Some(1.0)
            && page.value("sterna_relay_sessions", &[]) == Some(0.0)
    });
}

#[test]
fn compression_ratio_is_that_of_the_bytes_that_were_sent() {
    let directory = tempfile::tempdir().unwrap();
    let ours = ["--metrics", "127.0.0.1:0", "--compress", "zstd"];
    let (dialer, _acceptor, target) = pair(directory.path(), &ours, &[]);
    let (mut source, mut target) = connect(directory.path(), &target);
    let bytes = vec![9; 8 << 20];
    let sender = std::thread::spawn(move || source.write_all(&bytes).map(|()| source));
    target.read_exact(&mut vec![0; 8 << 20]).unwrap();
    let _source = sender.join().unwrap().unwrap();

    let page = exposition::fetch(dialer.metrics());

    let ratio = page.value("sterna_migration_compression_ratio", &[("role", "source")]);
    assert!(ratio > Some(10.0), "{ratio:?}");
    // The bytes themselves are counted before compression.
    let processed = page.value("sterna_migration_data_processed_bytes", &[("role", "source")]);
    assert_eq!(processed, Some(f64::from(8 << 20)));
}

#[test]
fn metrics_of_an_image_that_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let vm = crate::save::Process::start(directory.path().join("a"), &["--rate=1000"]);
    run(&["save", &vm.socket(), image.to_str().unwrap()]);
    let serve = super::Relay::of(&[
        "serve",
        image.to_str().unwrap(),
        "listen:tcp:127.0.0.1:0",
        "--metrics",
        "127.0.0.1:0",
        "--guests",
        "1",
    ]);
    assert_eq!(exposition::fetch(serve.metrics()).value("sterna_serve_guests", &[]), Some(0.0));
    serve.signal();
    let (_, said) = serve.end();
    assert!(said.is_empty() || !said.contains("panicked"), "{said}");
}

#[test]
fn metrics_of_a_standby_and_of_an_address_that_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let standby = super::Relay::of(&[
        "standby",
        &format!("listen:unix:{}", directory.path().join("standby").display()),
        "--metrics",
        "127.0.0.1:0",
        "--image",
        image.to_str().unwrap(),
    ]);
    let page = exposition::fetch(standby.metrics());
    assert_eq!(
        page.value("sterna_protection_state", &[("state", "waiting"), ("role", "standby")]),
        Some(1.0)
    );
    assert_eq!(page.value("sterna_protection_checkpoints_total", &[]), Some(0.0));

    let (status, said) =
        super::refused(&["listen:tcp:127.0.0.1:0", "--route", "a=unix:/x", "--metrics", "9187"]);
    assert!(status == Some(2) && said.contains("HOST:PORT"), "{status:?} {said}");
}

#[test]
fn record_of_each_session_becomes_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let records = directory.path().join("records");
    let missing = ["--report", records.to_str().unwrap()];
    let (status, said) =
        super::refused(&[&["listen:tcp:127.0.0.1:0", "--route", "a=unix:/x"], &missing[..]].concat());
    assert!(status == Some(2) && said.contains("does not exist"), "{status:?} {said}");
    std::fs::create_dir(&records).unwrap();
    let (dialer, _acceptor, target) = pair(directory.path(), &missing, &[]);
    super::exchange(connect(directory.path(), &target));
    dialer.signal();
    let (status, said) = dialer.end();
    assert_eq!(status, Some(0), "{said}");

    let files: Vec<_> = std::fs::read_dir(&records).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let record: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!((&record["schema"], &record["in_order"]), (&json!("sterna-relay-record"), &json!(true)));
    assert_eq!((&record["processed_bytes"], &record["answered_bytes"]), (&json!(200_000), &json!(6)));
    run(&["report", file.to_str().unwrap()]);
    let page = std::fs::read_to_string(file.with_extension("html")).unwrap();
    assert!(page.contains("<h1>Relayed migration</h1>") && page.contains("ended in order"), "{page}");
}

#[test]
fn relay_that_drains_says_what_it_waits_for_and_ends_it_after_the_time() {
    let directory = tempfile::tempdir().unwrap();
    let (dialer, _acceptor, target) = pair(directory.path(), &["--drain", "0"], &[]);
    let (mut source, _target) = connect(directory.path(), &target);

    dialer.signal();

    assert!(!matches!(source.read(&mut [0; 1]), Ok(1..)), "closed");
    let (status, said) = dialer.end();
    assert_eq!(status, Some(0), "{said}");
    for words in ["1 session is open", "waiting for session", "route web1: no migration", "(--drain)"] {
        assert!(said.contains(words), "{words} is not in {said}");
    }
}
