//! Calls over the daemon's socket.

use std::time::Duration;

use serde_json::json;
use sterna_libvirt::packet::{Head, PACKET_BYTES, QEMU, REMOTE};
use sterna_libvirt::xdr::{Writer, XdrError};
use sterna_libvirt::{Access, Connection, LibvirtError};
use sterna_transport::CancelFlag;

use crate::daemon::{Daemon, Mood, UUID};

const LIMIT: Duration = Duration::from_secs(30);
const QUERY: &str = r#"{"execute":"query-status"}"#;

fn connect(daemon: &Daemon) -> Connection {
    Connection::open(&daemon.socket(), "qemu:///system", LIMIT, &CancelFlag::new()).unwrap()
}

/// The error of a monitor command whose reply is `bytes`, after which the daemon closes.
fn error_of(bytes: Vec<u8>) -> LibvirtError {
    let daemon = Daemon::start(|mood: &mut Mood| mood.instead = Some((1, bytes)));
    let mut connection = connect(&daemon);
    let domain = connection.lookup("web1").unwrap();
    connection.command(&domain, QUERY, &[]).unwrap_err()
}

/// The head of the reply to the fourth call, which is the monitor command.
fn reply() -> Head {
    Head { program: QEMU, version: 1, procedure: 1, kind: Head::REPLY, serial: 4, status: 0 }
}

#[test]
fn domain_is_found_by_its_name_or_uuid_and_executes_commands() {
    let daemon = Daemon::start(|_| {});
    let mut connection = connect(&daemon);

    let domain = connection.lookup("web1").unwrap();
    let same = connection.lookup("0c0c0c0c-0c0c-0c0c-0c0c-0c0c0c0c0c0c").unwrap();
    let answer = connection.command(&domain, QUERY, &[]).unwrap();

    assert_eq!((domain.uuid, domain.id), (UUID, 1));
    assert_eq!(domain, same);
    assert!(answer.contains(r#""status":"running""#) && answer.contains("libvirt-13"), "{answer}");
    assert!(connection.xml(&domain).unwrap().starts_with("<domain"));
}

#[test]
fn refusal_names_the_call_its_procedure_and_libvirts_error() {
    let daemon = Daemon::start(|_| {});
    let mut connection = connect(&daemon);
    let domain = connection.lookup("web1").unwrap();

    let unknown = connection.lookup("nope").unwrap_err();
    let numbered = connection.command(&domain, r#"{"execute":"x","id":1}"#, &[]).unwrap_err();

    let LibvirtError::Refused { call, program, procedure, code, message } = unknown else { panic!() };
    assert_eq!((call, program, procedure, code), ("DOMAIN_LOOKUP_BY_NAME", REMOTE, 23, 42));
    assert!(message.contains("'nope'"), "{message}");
    assert!(matches!(numbered, LibvirtError::Refused { program: QEMU, procedure: 1, code: 1, .. }));
    // The connection can still be used.
    connection.command(&domain, QUERY, &[]).unwrap();
}

#[test]
fn ping_of_the_daemon_is_answered_during_calls() {
    let daemon = Daemon::start(|mood| mood.pings = true);
    let mut connection = connect(&daemon);
    let domain = connection.lookup("web1").unwrap();

    for _ in 0..3 {
        // The PING before this reply is answered before the next call.
        connection.command(&domain, QUERY, &[]).unwrap();
    }
}

#[test]
fn late_reply_to_a_call_that_timed_out_is_not_taken_for_the_next_one() {
    let daemon = Daemon::start(|mood| mood.late = true);
    let mut connection = connect(&daemon);
    let domain = connection.lookup("web1").unwrap();

    connection.set_limit(Duration::from_millis(100));
    let first = connection.command(&domain, QUERY, &[]).unwrap_err();
    connection.set_limit(LIMIT);
    let second = connection.command(&domain, r#"{"execute":"query-version"}"#, &[]).unwrap();

    assert!(matches!(first, LibvirtError::TimedOut { call: "QEMU_DOMAIN_MONITOR_COMMAND", .. }), "{first}");
    assert!(second.contains("major"), "{second}");
}

#[test]
fn reply_that_is_no_packet_is_refused() {
    for length in [0, 27, PACKET_BYTES as u32 + 1] {
        let error = error_of(length.to_be_bytes().to_vec());
        assert!(matches!(error, LibvirtError::NotRpc { .. }), "{length}: {error}");
    }
    for wrong in [
        Head { serial: 99, ..reply() },
        Head { program: REMOTE, ..reply() },
        Head { procedure: 7, ..reply() },
        Head { version: 2, ..reply() },
        Head { status: 2, ..reply() },
        Head { kind: 5, ..reply() },
    ] {
        let error = error_of(wrong.packet(&Writer::default().string("{}").into_bytes()));
        assert!(matches!(error, LibvirtError::NotRpc { .. }), "{wrong:?}: {error}");
    }
}

#[test]
fn reply_with_another_form_names_the_part() {
    let part = |error: LibvirtError| match error {
        LibvirtError::Malformed { program: QEMU, procedure: 1, error, .. } => error,
        error => panic!("{error}"),
    };

    assert_eq!(part(error_of(reply().packet(&[]))), XdrError::Truncated { what: "text" });
    let long = part(error_of(reply().packet(&u32::MAX.to_be_bytes())));
    assert!(matches!(long, XdrError::TooLong { what: "text", .. }));
    assert_eq!(part(error_of(reply().packet(b"\0\0\0\x01\xff\0\0\0"))), XdrError::NotText { what: "text" });
    let error = Head { status: 1, ..reply() }.packet(&[0; 8]);
    assert_eq!(part(error_of(error)), XdrError::Truncated { what: "error message" });
}

#[test]
fn reply_that_ends_early_is_a_closed_connection() {
    let whole = reply().packet(&Writer::default().string("{}").into_bytes());

    for length in 0..whole.len() {
        let error = error_of(whole[..length].to_vec());
        assert!(matches!(error, LibvirtError::Closed { .. }), "{length}: {error}");
    }
}

#[test]
fn events_of_the_domain_arrive_in_their_order() {
    let daemon = Daemon::start(|mood| {
        mood.events = vec![("STOP", None), ("MIGRATION", Some("{\"status\":\"active\"}"))]
    });
    let mut connection = connect(&daemon);
    let domain = connection.lookup("web1").unwrap();

    assert_eq!(connection.register_events(&domain).unwrap(), 3);
    let first = connection.next_event(LIMIT).unwrap().unwrap();
    let second = connection.next_event(LIMIT).unwrap().unwrap();

    assert_eq!((first.name.as_str(), first.seconds, first.microseconds), ("STOP", 7, 250_000));
    assert_eq!(second.details.as_deref(), Some("{\"status\":\"active\"}"));
    assert_eq!(connection.next_event(Duration::ZERO).unwrap(), None);
}

#[test]
fn daemon_that_wants_authentication_is_named_with_its_types() {
    let daemon = Daemon::start(|mood| mood.authentications = vec![2]);

    let error =
        Connection::open(&daemon.socket(), "qemu:///system", LIMIT, &CancelFlag::new()).err().unwrap();

    assert!(matches!(error, LibvirtError::Authentication { offered, .. } if offered == [2]));
}

#[test]
fn uri_that_the_daemon_does_not_have_is_its_refusal() {
    let daemon = Daemon::start(|_| {});

    let error = Connection::open(&daemon.socket(), "xen:///system", LIMIT, &CancelFlag::new()).err().unwrap();

    assert!(matches!(error, LibvirtError::Refused { call: "CONNECT_OPEN", code: 5, .. }), "{error}");
}

#[test]
fn domain_that_does_not_run_is_named() {
    let daemon = Daemon::start(|mood| mood.id = -1);

    let error = Access::open(&daemon.address(), &CancelFlag::new()).err().unwrap();

    assert!(matches!(error, LibvirtError::NotRunning { name } if name == "web1"));
}

#[test]
fn wait_ends_when_it_is_cancelled() {
    let daemon = Daemon::start(|mood| mood.late = true);
    let cancel = CancelFlag::new();
    let mut access = Access::open(&daemon.address(), &cancel).unwrap();

    let error = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| access.execute("query-status", json!(null), &[]));
        while daemon.mood.lock().unwrap().qemu.executed.is_empty() {
            std::thread::yield_now();
        }
        cancel.cancel();
        waiting.join().unwrap().unwrap_err()
    });

    assert!(matches!(error, LibvirtError::Cancelled), "{error}");
}
