//! Tests the protocol below the commands, with raw bytes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::{Value, json};
use sterna_qmp::migration::events::{RESUME, STOP};
use sterna_qmp::server::{EventSpec, MAX_CLIENTS, MAX_UNREAD_BYTES, MemberKind, MemberSpec, ServerError};
use sterna_qmp::{Client, Endpoint, Server};

use super::support::{ClientExt, LIMIT, Monitor};

const FILLER: EventSpec =
    EventSpec::new("FILLER", "").with(&[MemberSpec::required("filler", MemberKind::String, "")]);

struct Raw {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Raw {
    fn greeted(monitor: &Monitor) -> Self {
        let stream = UnixStream::connect(&monitor.path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut raw = Self { lines: BufReader::new(stream.try_clone().unwrap()), stream };
        let greeting = raw.line();
        assert_eq!(greeting["QMP"]["version"]["qemu"]["major"], 11);
        assert!(greeting["QMP"]["version"]["package"].as_str().unwrap().starts_with("Sterna "));
        assert_eq!(greeting["QMP"]["capabilities"], json!([]));
        raw
    }

    fn negotiated(monitor: &Monitor) -> Self {
        let mut raw = Self::greeted(monitor);
        assert_eq!(raw.ask(r#"{"execute":"qmp_capabilities"}"#), json!({"return": {}}));
        raw
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert!(line.is_ascii() && line.ends_with("\r\n"), "{line:?}");
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, text: impl AsRef<[u8]>) -> Value {
        self.send(text);
        self.line()
    }
}

fn class_of(answer: &Value) -> &str {
    answer["error"]["class"].as_str().unwrap_or("none")
}

#[test]
fn negotiation_comes_first_and_once() {
    let monitor = Monitor::running();
    let mut raw = Raw::greeted(&monitor);
    assert_eq!(class_of(&raw.ask(r#"{"execute":"query-status"}"#)), "CommandNotFound");
    assert_eq!(
        class_of(&raw.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#)),
        "GenericError"
    );
    assert_eq!(class_of(&raw.ask(r#"{"execute":"query-status"}"#)), "CommandNotFound");
    assert_eq!(raw.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":[]}}"#), json!({"return": {}}));
    assert_eq!(class_of(&raw.ask(r#"{"execute":"qmp_capabilities"}"#)), "CommandNotFound");
    assert_eq!(raw.ask(r#"{"execute":"query-status"}"#)["return"]["status"], "running");
}

#[test]
fn requests_of_wrong_shape_are_refused_and_ids_echoed() {
    let monitor = Monitor::running();
    let mut raw = Raw::negotiated(&monitor);
    for (request, class, id) in [
        (r#"{"execute":"no-such","id":1}"#, "CommandNotFound", json!(1)),
        (r#"{"execute":"stop","arguments":{"x":1},"id":"a"}"#, "GenericError", json!("a")),
        (r#"{"execute":"stop","arguments":[],"id":{"k":[1]}}"#, "GenericError", json!({"k": [1]})),
        (r#"{"execute":"stop","x":1,"id":[]}"#, "GenericError", json!([])),
        (r#"{"execute":1,"id":null}"#, "GenericError", Value::Null),
        (r#"{"id":2}"#, "GenericError", json!(2)),
        (r#"{"exec-oob":"stop","id":3}"#, "GenericError", json!(3)),
    ] {
        let answer = raw.ask(request);
        assert_eq!(class_of(&answer), class, "{request}");
        assert_eq!(answer.get("id"), Some(&id), "{request}");
    }
    assert!(raw.ask("{}").get("id").is_none());
    assert_eq!(class_of(&raw.ask("[]")), "GenericError");
    assert_eq!(raw.ask(r#"{"execute":"query-name","id":9}"#), json!({"return": {"name": "tern"}, "id": 9}));
}

#[test]
fn framing_needs_no_newlines_and_survives_garbage() {
    let monitor = Monitor::running();
    let mut raw = Raw::negotiated(&monitor);
    raw.send(r#"{"execute":"query-name","id":1}{"execute":"query-name","id":2}  {"execute":"#);
    raw.send("\n\t'query-name', 'id': 'it\\'s \"3\"'}");
    assert_eq!((raw.line()["id"].clone(), raw.line()["id"].clone()), (json!(1), json!(2)));
    assert_eq!(raw.line()["id"], "it's \"3\"");
    let too_long = format!("{{\"execute\":\"{}\"}}\n", "x".repeat(2 << 20));
    let too_deep = format!("{}\n", "[".repeat(200));
    for garbage in [
        "garbage }]\n",
        "{]",
        "{\"a\":}",
        "{\"a\n",
        "{\u{e9}\n",
        "12 ",
        "\u{1}",
        &too_long,
        &too_deep,
        "{\"a\":1e999}",
    ] {
        assert_eq!(class_of(&raw.ask(garbage)), "GenericError", "{:?}", &garbage[..garbage.len().min(20)]);
        let answer = raw.ask(r#"{"execute":"query-name","id":"after é"}"#);
        assert_eq!(answer, json!({"return": {"name": "tern"}, "id": "after é"}));
    }
    raw.send(b"{\"execute\":\"query-name\xff");
    assert_eq!(class_of(&raw.line()), "GenericError");
    assert_eq!(raw.ask(r#"{"execute":"query-name"}"#)["return"]["name"], "tern");
}

#[test]
fn events_wait_for_the_negotiation() {
    let monitor = Monitor::running();
    let mut early = Raw::greeted(&monitor);
    let mut ready = monitor.client();
    monitor.bus.emit(&STOP, None);
    ready.event("STOP");
    assert_eq!(early.ask(r#"{"execute":"qmp_capabilities"}"#), json!({"return": {}}));
    monitor.bus.emit(&RESUME, None);
    assert_eq!(early.line()["event"], "RESUME");
}

#[test]
fn client_that_reads_nothing_is_cut_off_and_blocks_nobody() {
    let monitor = Monitor::running();
    let mut slow = Raw::negotiated(&monitor);
    let mut other = monitor.client();
    let filler = "x".repeat(64 << 10);
    // More than the socket and the outbox can store together. The other client continues to read.
    for _ in 0..(4 * MAX_UNREAD_BYTES / filler.len()) {
        monitor.bus.emit(&FILLER, Some(json!({"filler": filler})));
        other.event("FILLER");
    }
    let mut rest = Vec::new();
    // The read ends by end of file or reset. With a client that is still served it would block.
    let _ = slow.lines.read_to_end(&mut rest);
    assert!(rest.len() < 2 * MAX_UNREAD_BYTES);
    assert_eq!(other.ok("query-status", Value::Null)["running"], true);
}

#[test]
fn answers_to_a_half_closed_connection_still_arrive() {
    let monitor = Monitor::running();
    let mut raw = Raw::negotiated(&monitor);
    raw.send(r#"{"execute":"query-name"}"#);
    raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(raw.line()["return"]["name"], "tern");
    assert_eq!(raw.lines.read(&mut [0]).unwrap(), 0);
}

#[test]
fn pipelined_commands_beyond_the_high_water_mark_are_all_answered() {
    let monitor = Monitor::running();
    let mut raw = Raw::negotiated(&monitor);
    let count = 200;
    let mut writer = raw.stream.try_clone().unwrap();
    let write = std::thread::spawn(move || {
        for id in 0..count {
            writer.write_all(format!("{{\"execute\":\"query-qmp-schema\",\"id\":{id}}}").as_bytes()).unwrap();
        }
    });
    for id in 0..count {
        assert_eq!(raw.line()["id"], id);
    }
    write.join().unwrap();
}

#[test]
fn clients_beyond_the_limit_are_turned_away_until_one_leaves() {
    let monitor = Monitor::running();
    let mut clients: Vec<_> = (0..MAX_CLIENTS).map(|_| monitor.client()).collect();
    let mut extra = UnixStream::connect(&monitor.path).unwrap();
    extra.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(!matches!(extra.read(&mut [0]), Ok(1..)), "no greeting");
    clients.pop();
    // A client can connect again after the server has noticed the disconnect.
    let deadline = std::time::Instant::now() + LIMIT;
    while Client::connect(monitor.server.endpoint(), LIMIT).is_err() {
        assert!(std::time::Instant::now() < deadline, "no place became free");
    }
}

#[test]
fn close_leaves_no_thread_descriptor_or_file() {
    let monitor = Monitor::running();
    let path = monitor.path.clone();
    let mut idle = Raw::negotiated(&monitor);
    let silent = UnixStream::connect(&path).unwrap();
    monitor.server.close();
    assert!(!path.exists());
    assert_eq!(idle.lines.read(&mut [0]).unwrap(), 0, "closed");
    drop(silent);
    // Every session has a reference to the control. If only the test has one, no thread of the server is left.
    assert_eq!(std::sync::Arc::strong_count(&monitor.control), 1);
    UnixStream::connect(&path).unwrap_err();
}

#[test]
fn socket_file_left_behind_is_replaced_a_live_or_foreign_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let monitor = Monitor::running();
    let bind = |path: &std::path::Path| {
        Server::bind(&Endpoint::Unix(path.into()), monitor.control.clone(), monitor.bus.clone())
    };
    let stale = directory.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    let server = bind(&stale).unwrap();
    assert!(matches!(bind(&stale), Err(ServerError::InUse(_))));
    // A file that has replaced the socket file must not be removed.
    fs::remove_file(&stale).unwrap();
    fs::write(&stale, "theirs").unwrap();
    drop(server);
    assert_eq!(fs::read(&stale).unwrap(), b"theirs");
    assert!(matches!(bind(&stale), Err(ServerError::NotASocket(_))));
    assert!(bind(&directory.path().join("x".repeat(200))).is_err());
}

#[test]
fn socket_file_whose_path_is_longer_than_an_address_is_served_replaced_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let monitor = Monitor::running();
    let deep = directory.path().join("a".repeat(60)).join("b".repeat(60));
    fs::create_dir_all(&deep).unwrap();
    let path = deep.join("qmp");
    let bind = || Server::bind(&Endpoint::Unix(path.clone()), monitor.control.clone(), monitor.bus.clone());

    // The owner of the socket has ended without removing the file.
    drop(UnixListener::bind(sterna_transport::UnixPath::new(&path).unwrap().as_path()).unwrap());
    let server = bind().unwrap();
    assert!(matches!(bind(), Err(ServerError::InUse(_))));
    let mut client = Client::connect(&Endpoint::Unix(path.clone()), LIMIT).unwrap();
    assert_eq!(client.execute("query-status", Value::Null).unwrap()["status"], "running");
    drop(server);

    assert!(!path.exists());
}

#[test]
fn tcp_serves_loopback_and_nothing_else() {
    let monitor = Monitor::running();
    let bind =
        |text: &str| Server::bind(&text.parse().unwrap(), monitor.control.clone(), monitor.bus.clone());
    let server = bind("tcp:localhost:0").unwrap();
    let mut client = Client::connect(server.endpoint(), LIMIT).unwrap();
    assert_eq!(client.ok("query-name", Value::Null)["name"], "tern");
    assert!(matches!(bind("tcp:0.0.0.0:0"), Err(ServerError::NotLoopback(_))));
    assert!("tcp:nowhere".parse::<Endpoint>().is_err() && "".parse::<Endpoint>().is_err());
}
