//! Tests that commands at the wrong time and invalid addresses are refused, with advice.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::{Value, json};
use sterna::{Address, RunState, SourceVm, Status};
use sterna_qmp::migration::{GuestAt, Receiving, from_channels, from_uri};

use super::support::{ClientExt, FakeVm, LIMIT, Monitor};

const SOMEWHERE: &str = "tcp:127.0.0.1:1";

fn to_somewhere() -> Value {
    json!({"uri": SOMEWHERE})
}

#[test]
fn uris_give_addresses_or_refusals() {
    let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
    let rdma = |host: &str, port| Address::Rdma { host: host.into(), port };
    for (uri, expected) in [
        ("tcp:127.0.0.1:4444", tcp("127.0.0.1", 4444)),
        ("tcp::0", tcp("", 0)),
        ("tcp:[::1]:65535", tcp("::1", 65535)),
        ("unix:/run/a:b", Address::Unix(PathBuf::from("/run/a:b"))),
        ("fd:mig", Address::Fd("mig".into())),
        ("fd:7", Address::Fd("7".into())),
        ("rdma:h:4444", rdma("h", 4444)),
        ("rdma:[fd09::1]:4444", rdma("fd09::1", 4444)),
        ("rdma::0", rdma("", 0)),
        ("file:/x,offset=1M", Address::File { path: "/x".into(), offset: 1 << 20 }),
    ] {
        assert_eq!(from_uri(uri).unwrap(), expected);
    }
    for uri in [
        "",
        "tcp",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp:host:+1",
        "tcp:host:65536",
        "tcp:host:http",
        "tcp:host:1,ipv4=on",
        "tcp:::1:1",
        "tcp:[::1]1",
        "unix:",
        "fd:",
        "exec:cat",
        "rdma:",
        "rdma:h",
        "rdma:h:",
        "rdma:h:http",
        "rdma:h:65536",
        "rdma:h:1,ipv4=on",
        "rdma:fd09::1:1",
        "unix:/a\0b",
        "file:",
        "file:/x,offset=y",
        "file:/dev/fdset/1",
        "vsock:2:1",
        "ftp:x",
        "localhost:4444",
    ] {
        assert!(from_uri(uri).is_err(), "{uri}");
    }
    assert!(from_uri(&format!("unix:/{}", "x".repeat(107))).is_err());
}

#[test]
fn refused_uris_are_answered_in_qemus_words_and_with_the_rule() {
    for (uri, words) in [
        ("ftp:x", ["unknown migration protocol: ftp:x", "rdma:HOST:PORT"]),
        ("localhost", ["unknown migration protocol: localhost", "tcp:HOST:PORT"]),
        ("exec:cat", ["'exec:' migration is not supported by Sterna", "rdma:HOST:PORT"]),
        ("vsock:2:1", ["'vsock:' migration is not supported by Sterna", "unix:PATH"]),
        ("tcp:h:http", ["error parsing address 'tcp:h:http'", "service names are not resolved"]),
        ("tcp:::1:1", ["error parsing address 'tcp:::1:1'", "[NUMBER]:PORT"]),
        ("rdma:h", ["error parsing address 'rdma:h'", "a port must follow"]),
        ("unix:", ["error parsing address 'unix:'", "a path must follow"]),
        ("fd:", ["error parsing address 'fd:'", "name must follow"]),
        ("file:/dev/fdset/1", ["error parsing address 'file:/dev/fdset/1'", "give the file's own path"]),
    ] {
        let refusal = from_uri(uri).unwrap_err().desc;
        assert!(words.iter().all(|word| refusal.contains(word)), "{uri}: {refusal}");
    }
}

#[test]
fn channels_give_addresses_or_refusals() {
    let main = |addr: Value| json!([{"channel-type": "main", "addr": addr}]);
    let inet = json!({"transport": "socket", "type": "inet", "host": "h", "port": "44"});
    for (addr, expected) in [
        (inet.clone(), Address::Tcp { host: "h".into(), port: 44 }),
        (
            json!({"transport": "socket", "type": "inet", "host": "fd09::1", "port": "44"}),
            Address::Tcp { host: "fd09::1".into(), port: 44 },
        ),
        (
            json!({"transport": "rdma", "host": "h", "port": "44"}),
            Address::Rdma { host: "h".into(), port: 44 },
        ),
        (
            json!({"transport": "rdma", "host": "fd09::1", "port": "44"}),
            Address::Rdma { host: "fd09::1".into(), port: 44 },
        ),
        (json!({"transport": "socket", "type": "unix", "path": "/s"}), Address::Unix("/s".into())),
        (json!({"transport": "socket", "type": "fd", "str": "mig"}), Address::Fd("mig".into())),
        (
            json!({"transport": "file", "filename": "/x,offset=1", "offset": 7}),
            Address::File { path: "/x,offset=1".into(), offset: 7 },
        ),
    ] {
        assert_eq!(from_channels(&main(addr)).unwrap(), expected);
    }
    for bad in [
        json!([]),
        json!("main"),
        json!([1]),
        json!([{"channel-type": "main", "addr": inet}, {"channel-type": "main", "addr": inet}]),
        json!([{"channel-type": "cpr", "addr": inet}]),
        json!([{"channel-type": "preempt", "addr": inet}]),
        json!([{"channel-type": "main"}]),
        json!([{"addr": inet}]),
        json!([{"channel-type": "main", "addr": inet, "more": 1}]),
        main(json!(1)),
        main(json!({"type": "inet", "host": "h", "port": "44"})),
        main(json!({"transport": "socket", "type": "inet", "host": "h", "port": 44})),
        main(json!({"transport": "socket", "type": "inet", "host": "h"})),
        main(json!({"transport": "socket", "type": "inet", "host": "h", "port": "44", "to": 50})),
        main(json!({"transport": "socket", "type": "vsock", "cid": "2", "port": "44"})),
        main(json!({"transport": "socket", "type": "carrier-pigeon"})),
        main(json!({"transport": "exec", "args": ["cat"]})),
        main(json!({"transport": "socket", "type": "inet", "host": "h", "port": "http"})),
        main(json!({"transport": "socket", "type": "unix", "path": ""})),
        main(json!({"transport": "rdma", "host": "h"})),
        main(json!({"transport": "rdma", "port": "44"})),
        main(json!({"transport": "rdma", "host": "h", "port": 44})),
        main(json!({"transport": "rdma", "host": 7, "port": "44"})),
        main(json!({"transport": "rdma", "host": "h", "port": "http"})),
        main(json!({"transport": "rdma", "host": "h", "port": ""})),
        main(json!({"transport": "rdma", "host": "h", "port": "44", "ipv4": true})),
        main(json!({"transport": "file", "filename": "/x"})),
        main(json!({"transport": "file", "filename": "", "offset": 0})),
        main(json!({"transport": "file", "filename": "/x", "offset": -1})),
        main(json!({"transport": "file", "filename": "/dev/fdset/1", "offset": 0})),
        main(json!({"transport": "warp"})),
    ] {
        assert!(from_channels(&bad).is_err(), "{bad}");
    }
}

#[test]
fn migrate_arguments_that_qemu_refuses_are_refused() {
    let (_monitor, mut client) = Monitor::running().client_of();
    let channels = json!([{"channel-type": "main",
        "addr": {"transport": "socket", "type": "inet", "host": "127.0.0.1", "port": "1"}}]);
    for (arguments, word) in [
        (json!({}), "either 'uri' or 'channels'"),
        (json!({"uri": SOMEWHERE, "channels": channels}), "mutually exclusive"),
        (json!({"uri": SOMEWHERE, "resume": true}), "resume"),
        (json!({"uri": SOMEWHERE, "blk": true}), "Parameter 'blk' is unexpected"),
        (json!({"uri": SOMEWHERE, "inc": false}), "Parameter 'inc' is unexpected"),
        (json!({"uri": 7}), "Invalid parameter type for 'uri', expected: string"),
        (json!({"uri": "exec:cat"}), "not supported by Sterna"),
        (json!({"uri": "fd:nobody"}), "getfd"),
    ] {
        let refusal = client.refused("migrate", arguments);
        assert!(refusal.contains(word), "{refusal}");
    }
    client.ok("migrate", json!({"channels": channels, "detach": true, "resume": false}));
}

#[test]
fn migrate_twice_is_refused_and_possible_again_after_cancel() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", to_somewhere());
    for status in [Status::Setup, Status::Active, Status::Device, Status::Undecided, Status::Failing] {
        monitor.engine.outgoing().set(status);
        assert!(client.refused("migrate", to_somewhere()).contains("in progress"));
    }
    monitor.engine.outgoing().set(Status::Active);
    client.ok("migrate_cancel", Value::Null);
    client.ok("migrate", to_somewhere());
}

#[test]
fn migrate_while_incoming_is_refused() {
    let (_monitor, mut client) = Monitor::waiting(true).client_of();
    assert!(client.refused("migrate", to_somewhere()).contains("incoming"));
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    assert!(client.refused("migrate", to_somewhere()).contains("incoming"));
}

#[test]
fn guest_that_has_left_can_neither_run_nor_migrate_nor_be_cancelled() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", to_somewhere());
    monitor.vm.set_running(false);
    monitor.engine.outgoing().set(Status::Completed);
    assert_eq!(client.ok("query-status", Value::Null), json!({"running": false, "status": "postmigrate"}));
    for (command, arguments) in [("cont", Value::Null), ("migrate", to_somewhere())] {
        client.refused(command, arguments);
    }
}

#[test]
fn cancel_without_a_migration_does_nothing_as_in_qemu() {
    let (monitor, mut client) = Monitor::running().client_of();
    assert_eq!(client.ok("migrate_cancel", Value::Null), json!({}));
    client.ok("migrate", to_somewhere());
    for end in [Status::Failed, Status::Completed] {
        monitor.engine.outgoing().set(end);
        assert_eq!(client.ok("migrate_cancel", Value::Null), json!({}));
        let status = client.ok("query-migrate", Value::Null)["status"].clone();
        assert_eq!(status, sterna_qmp::migration::status_word(end));
    }
    monitor.engine.outgoing().set(Status::Cancelling);
    client.ok("migrate_cancel", Value::Null);
}

#[test]
fn incoming_twice_or_without_being_told_to_wait_is_refused() {
    let (_monitor, mut client) = Monitor::running().client_of();
    assert!(client.refused("migrate-incoming", to_somewhere()).contains("-incoming defer"));

    let (monitor, mut client) = Monitor::waiting(true).client_of();
    assert!(
        client
            .refused("migrate-incoming", json!({"uri": "tcp::0", "exit-on-error": true}))
            .contains("exit-on-error")
    );
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0", "exit-on-error": false}));
    assert!(client.refused("migrate-incoming", to_somewhere()).contains("already"));
    monitor.engine.incoming().set(Status::Failed);
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    client.ok("migrate_cancel", Value::Null);
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    monitor.vm.set_has_guest();
    monitor.engine.incoming().set(Status::Completed);
    assert!(client.refused("migrate-incoming", to_somewhere()).contains("has already arrived"));
}

#[test]
fn stop_that_is_refused_in_a_handover_does_not_count_for_the_next_guest() {
    let (monitor, mut client) = Monitor::waiting(true).client_of();
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    *monitor.engine.incoming().is_handed_over.lock().unwrap() = true;
    assert!(client.refused("stop", Value::Null).contains("handed over at this moment"));
    // The refused `stop` changes nothing.
    client.ok("cont", Value::Null);
    assert!(client.refused("stop", Value::Null).contains("handed over at this moment"));
    monitor.engine.incoming().set(Status::Failed);

    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));

    assert!(*monitor.engine.incoming().autostart.lock().unwrap());
    client.ok("stop", Value::Null);
    assert!(!*monitor.engine.incoming().autostart.lock().unwrap());
}

#[test]
fn stop_and_cont_in_the_switchover_are_refused() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", to_somewhere());
    monitor.vm.set_running(false);
    for status in [Status::PreSwitchover, Status::Device, Status::Undecided] {
        monitor.engine.outgoing().set(status);
        assert_eq!(client.ok("query-status", Value::Null)["status"], "finish-migrate");
        client.refused("stop", Value::Null);
        client.refused("cont", Value::Null);
    }
    monitor.engine.outgoing().set(Status::Active);
    client.ok("stop", Value::Null);
    client.ok("cont", Value::Null);
}

#[test]
fn cont_that_meets_the_switchover_is_over_before_the_guest_is_stopped() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", to_somewhere());
    let (migration, vm) = (monitor.engine.outgoing(), monitor.vm.clone());
    let (began, begins) = std::sync::mpsc::channel();
    *monitor.vm.at_cont.lock().unwrap() = Some(Box::new(move || {
        // The switchover begins during `cont`, and gets enough time to stop the guest.
        began.send(()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200));
    }));
    let switchover = std::thread::spawn(move || {
        begins.recv().unwrap();
        migration.set(Status::Device);
        vm.set_running(false);
    });
    client.ok("cont", Value::Null);
    switchover.join().unwrap();
    assert_eq!(client.ok("query-status", Value::Null)["status"], "finish-migrate");
    assert_eq!(monitor.vm.run_state(), RunState::Paused, "it runs behind the commit");
    client.refused("cont", Value::Null);
}

#[test]
fn guest_that_could_not_be_brought_back_is_tried_again_by_cont() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", to_somewhere());
    monitor.vm.set_running(false);
    *monitor.engine.outgoing().held.lock().unwrap() = true;
    monitor.engine.outgoing().set(Status::Failed);
    assert!(client.refused("stop", Value::Null).contains("'cont' tries again"));
    client.ok("cont", Value::Null);
    client.event("RESUME");
    assert!(!*monitor.engine.outgoing().held.lock().unwrap());
    client.ok("cont", Value::Null);
}

#[test]
fn migrate_continue_works_in_its_state_alone() {
    let (monitor, mut client) = Monitor::running().client_of();
    let go_on = json!({"state": "pre-switchover"});
    assert!(client.refused("migrate-continue", json!({})).contains("'state' is missing"));
    assert!(client.refused("migrate-continue", go_on.clone()).contains("pause-before-switchover"));
    client.ok("migrate", to_somewhere());
    monitor.engine.outgoing().set(Status::Active);
    client.refused("migrate-continue", go_on.clone());
    monitor.engine.outgoing().set(Status::PreSwitchover);
    client.refused("migrate-continue", json!({"state": "device"}));
    client.ok("migrate-continue", go_on);
    assert_eq!(client.ok("query-migrate", Value::Null)["status"], "device");
}

#[test]
fn undecided_keeps_qemus_word_and_is_decided_by_an_operator() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.refused("x-sterna-decide", json!({"guest": "source"}));
    client.ok("migrate", to_somewhere());
    monitor.vm.set_running(false);
    monitor.engine.outgoing().set(Status::Undecided);
    assert!(client.event("X_STERNA_UNDECIDED")["reason"].as_str().unwrap().contains("x-sterna-decide"));
    let info = client.ok("query-migrate", Value::Null);
    assert_eq!((&info["status"], &info["x-sterna-undecided"]), (&json!("device"), &json!(true)));
    assert!(info["error-desc"].as_str().unwrap().contains("x-sterna-decide"));
    assert!(client.refused("migrate_cancel", Value::Null).contains("committed"));
    client.refused("x-sterna-decide", json!({"guest": "elsewhere"}));
    client.refused("x-sterna-decide", json!({"guest": "destination", "expect": "completed"}));
    client.refused("x-sterna-decide", json!({"guest": "destination", "expect": "postcopy-paused"}));
    assert_eq!(*monitor.engine.outgoing().decided.lock().unwrap(), None);
    client.ok("x-sterna-decide", json!({"guest": "destination", "expect": "undecided"}));
    assert_eq!(*monitor.engine.outgoing().decided.lock().unwrap(), Some(GuestAt::Destination));
}

#[test]
fn held_guest_is_discarded_by_force_only() {
    let (monitor, mut client) = Monitor::waiting(false).client_of();
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    monitor.engine.incoming().set(Status::Held);

    for arguments in [Value::Null, json!({}), json!({"x-sterna-force": false})] {
        // The engine decides the text of the refusal, which is the same for all clients.
        assert_eq!(client.refused("migrate_cancel", arguments), "by force only");
        assert_eq!(Receiving::status(&*monitor.engine.incoming()), Status::Held);
    }
    assert!(client.refused("migrate_cancel", json!({"x-sterna-force": "yes"})).contains("boolean"));
    client.ok("migrate_cancel", json!({"x-sterna-force": true}));

    assert_eq!(Receiving::status(&*monitor.engine.incoming()), Status::Cancelled);
    // A guest that has not arrived cannot be lost, so no force is needed.
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    client.ok("migrate_cancel", Value::Null);
    assert_eq!(Receiving::status(&*monitor.engine.incoming()), Status::Cancelled);
}

#[test]
fn held_guest_starts_on_cont_before_or_after_it_has_come() {
    for cont_first in [true, false] {
        let (monitor, mut client) = Monitor::waiting(false).client_of();
        client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
        if cont_first {
            client.ok("cont", Value::Null);
        }
        monitor.engine.incoming().set(Status::Held);
        if !cont_first {
            let info = client.ok("query-migrate", Value::Null);
            assert_eq!(info, json!({"status": "completed", "x-sterna-held": true}));
            assert_eq!(client.ok("query-status", Value::Null)["status"], "paused");
            client.ok("cont", Value::Null);
        }
        client.event("RESUME");
        assert_eq!(client.ok("query-status", Value::Null)["status"], "running");
    }
}

#[test]
fn run_states_are_qemus() {
    for (has_guest, running, autostart, expected) in [
        (true, true, true, "running"),
        (true, false, true, "paused"),
        (true, false, false, "prelaunch"),
        (false, false, true, "inmigrate"),
    ] {
        let (_monitor, mut client) = Monitor::of(FakeVm::new(has_guest, running), autostart).client_of();
        assert_eq!(client.ok("query-status", Value::Null)["status"], expected);
    }
}

#[test]
fn getfd_names_a_passed_socket_for_one_migration() {
    let (monitor, mut client) = Monitor::running().client_of();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(client.refused("getfd", json!({"fdname": "mig"})).contains("SCM_RIGHTS"));
    client.send_fd("mig", socket.as_fd()).unwrap();
    client.ok("closefd", json!({"fdname": "mig"}));
    assert!(client.refused("closefd", json!({"fdname": "mig"})).contains("not found"));
    client.send_fd("mig", socket.as_fd()).unwrap();
    client.capability("multifd", true).unwrap();
    assert!(client.refused("migrate", json!({"uri": "fd:mig"})).contains("multi-channel"));
    client.capability("multifd", false).unwrap();
    client.send_fd("mig", socket.as_fd()).unwrap();
    client.ok("migrate", json!({"uri": "fd:mig"}));
    let Address::Handed(fd) = monitor.engine.outgoing().address.clone() else { panic!("no descriptor") };
    assert_eq!(fd.name(), "mig");
    client.ok("migrate_cancel", Value::Null);
    assert!(client.refused("migrate", json!({"uri": "fd:mig"})).contains("getfd"), "used up");
    let file = tempfile::tempfile().unwrap();
    client.send_fd("file", file.as_fd()).unwrap();
    assert!(client.refused("migrate", json!({"uri": "fd:file"})).contains("not a socket"));
    client.refused("getfd", json!({"fdname": "1abc"}));
}

#[test]
fn socket_of_a_refused_start_is_closed() {
    for (monitor, command) in [(Monitor::running(), "migrate"), (Monitor::waiting(true), "migrate-incoming")]
    {
        let (monitor, mut client) = monitor.client_of();
        *monitor.engine.refuses.lock().unwrap() = true;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        client.send_fd("mig", ours.as_fd()).unwrap();
        drop(ours);
        assert!(client.refused(command, json!({"uri": "fd:mig"})).contains("told to refuse"));
        theirs.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(theirs.read(&mut [0]).expect("it is still open"), 0);
    }
}
