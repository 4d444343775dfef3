//! Tests the client with servers that break the protocol.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use serde_json::{Value, json};
use sterna_qmp::{Client, ClientError, Endpoint};
use sterna_transport::CancelFlag;

use super::support::{ClientExt, LIMIT, Monitor};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"major": 9, "minor": 0, "micro": 0}, "package": "Debian"},
    "capabilities": ["oob"]}}"#;

/// A server that, after the greeting, reads a chunk and writes a line, for each of `lines`.
fn scripted(lines: &'static [&'static str]) -> (UnixStream, thread::JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        theirs.write_all(GREETING.as_bytes()).unwrap();
        for line in lines {
            let _ = theirs.read(&mut [0; 4096]);
            let _ = theirs.write_all(line.as_bytes());
        }
        // Keep the connection open until the client closes it.
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
fn monitor_whose_queue_is_full_is_waited_for_until_the_limit_or_a_cancel() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket =
        || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let mut waiting = Vec::new();
    loop {
        let client = socket();
        if connect(&client, &address).is_err() {
            break;
        }
        waiting.push(client);
    }
    let endpoint = Endpoint::Unix(path);
    let limit = Duration::from_millis(300);

    let Err(late) = Client::connect(&endpoint, limit) else { panic!("nobody accepts") };
    assert!(late.to_string().contains("queue of connections has been full for 300ms"), "{late}");

    let (cancel, began) = (CancelFlag::new(), Instant::now());
    let cancels = cancel.clone();
    let canceller = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        cancels.cancel();
    });
    let Err(cancelled) = Client::connect_unless(&endpoint, LIMIT, &cancel) else { panic!("nobody accepts") };
    assert!(matches!(cancelled, ClientError::Cancelled { .. }), "{cancelled}");
    assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    canceller.join().unwrap();
}

/// After a partial command, the server would misread the next one.
#[test]
fn command_that_was_sent_in_part_is_the_last_of_its_connection() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let server = thread::spawn(move || {
        theirs.write_all(GREETING.as_bytes()).unwrap();
        let _ = theirs.read(&mut [0; 4096]);
        theirs.write_all(br#"{"return": {}, "id": 1}"#).unwrap();
        // From here on the server reads nothing.
        let _ = ends.recv();
    });
    let mut client = Client::from_socket(ours.into(), LIMIT).unwrap();
    client.set_limit(Duration::from_millis(100));
    // More than the socket buffer can store.
    let long = json!({ "text": "x".repeat(4 << 20) });

    let first = client.execute("long", long);
    let second = client.execute("short", Value::Null);

    assert!(first.is_err(), "{first:?}");
    assert!(
        matches!(&second, Err(ClientError::Io { error, .. }) if error.to_string().contains("only partly")),
        "{second:?}"
    );
    drop(end);
    server.join().unwrap();
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
