//! The client against servers that do not behave.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_qmp::{Client, ClientError, Endpoint};

use super::support::{ClientExt, LIMIT, Monitor};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"major": 9, "minor": 0, "micro": 0}, "package": "Debian"},
    "capabilities": ["oob"]}}"#;

/// A server that reads a chunk and writes a line, for each of `lines` after the greeting.
fn scripted(lines: &'static [&'static str]) -> (UnixStream, thread::JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        theirs.write_all(GREETING.as_bytes()).unwrap();
        for line in lines {
            let _ = theirs.read(&mut [0; 4096]);
            let _ = theirs.write_all(line.as_bytes());
        }
        // Keeps the connection until the client lets go of it.
        let _ = theirs.read_to_end(&mut Vec::new());
    });
    (ours, server)
}

#[test]
fn qemu_greeting_is_understood_and_refusals_are_typed() {
    let (socket, _server) = scripted(&[
        r#"{"return": {}, "id": 1}"#,
        r#"{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "STOP"}
           {"id": 2, "error": {"class": "DeviceNotActive", "desc": "no"}}"#,
    ]);
    let mut client = Client::from_socket(socket.into(), LIMIT).unwrap();
    assert!(!client.is_sterna());
    assert_eq!(client.version()["qemu"]["major"], 9);
    match client.execute("eject", json!({})) {
        Err(ClientError::Refused { command, class, desc }) => {
            assert_eq!((command.as_str(), class.as_str(), desc.as_str()), ("eject", "DeviceNotActive", "no"));
        }
        other => panic!("{other:?}"),
    }
    let event = client.next_event(Duration::ZERO).unwrap().unwrap();
    assert_eq!((event.name.as_str(), event.timestamp), ("STOP", Duration::new(7, 5000)));
    assert!(client.next_event(Duration::from_millis(1)).unwrap().is_none());
}

#[test]
fn silence_times_out_and_the_late_answer_is_not_taken_for_another() {
    let (socket, _server) = scripted(&[
        r#"{"return": {}, "id": 1}"#,
        "",
        r#"{"return": "late", "id": 2} {"return": "right", "id": 3}"#,
    ]);
    let mut client = Client::from_socket(socket.into(), LIMIT).unwrap();
    client.set_limit(Duration::from_millis(20));
    assert!(matches!(client.execute("slow", Value::Null), Err(ClientError::TimedOut { .. })));
    client.set_limit(LIMIT);
    assert_eq!(client.execute("quick", Value::Null).unwrap(), "right");
}

#[test]
fn servers_that_are_no_monitors_give_protocol_errors() {
    for bytes in ["SSH-2.0-OpenSSH\r\n", "{\"hello\": 1}", "[]"] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes.as_bytes()).unwrap();
        assert!(matches!(Client::from_socket(ours.into(), LIMIT), Err(ClientError::Protocol(_))), "{bytes}");
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    assert!(matches!(Client::from_socket(ours.into(), LIMIT), Err(ClientError::Closed { .. })));
    let nowhere = Endpoint::Unix("/nonexistent/qmp".into());
    assert!(matches!(Client::connect(&nowhere, LIMIT), Err(ClientError::Connect { .. })));
}

#[test]
fn monitor_that_ends_is_seen_as_closed() {
    let monitor = Monitor::running();
    let mut client = monitor.client();
    assert!(client.is_sterna());
    monitor.server.close();
    assert!(matches!(client.execute("stop", Value::Null), Err(ClientError::Closed { .. })));
}

#[test]
fn limit_without_end_is_no_overflow() {
    let monitor = Monitor::running();
    let mut client = Client::connect(monitor.server.endpoint(), Duration::MAX).unwrap();
    client.ok("query-status", Value::Null);
}
