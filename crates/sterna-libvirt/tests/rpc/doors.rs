//! A QMP client on a door's socket.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};
use sterna_libvirt::Door;
use sterna_transport::CancelFlag;

use crate::daemon::{Daemon, Mood};
use crate::qemu::Device;

struct Client {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Client {
    fn new(socket: OwnedFd) -> Self {
        let stream = UnixStream::from(socket);
        let lines = BufReader::new(stream.try_clone().unwrap());
        Self { stream, lines }
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or(Value::Null)
    }

    fn execute(&mut self, command: Value) -> Value {
        writeln!(self.stream, "{command}").unwrap();
        self.next()
    }
}

fn open(daemon: &Daemon) -> (Door, Client) {
    let (door, socket) = Door::open(&daemon.address(), &CancelFlag::new()).unwrap();
    let mut client = Client::new(socket);
    assert!(client.next()["QMP"]["version"]["qemu"]["major"].is_u64());
    (door, client)
}

fn new_qemu(mood: &mut Mood) {
    mood.qemu.is_new = true;
}

#[test]
fn old_qemu_is_reached_through_libvirts_monitor() {
    let daemon = Daemon::start(|mood| {
        mood.events = vec![("STOP", None), ("MIGRATION", Some("{\"status\":\"setup\"}"))]
    });
    let (door, mut client) = open(&daemon);

    assert!(!door.is_own_monitor() && door.passes_files());
    let events = [client.next(), client.next()];
    assert_eq!((&events[0]["event"], &events[1]["event"]), (&json!("STOP"), &json!("MIGRATION")));
    assert_eq!(events[1]["data"]["status"], "setup");
    assert_eq!(events[0]["timestamp"], json!({"seconds": 7, "microseconds": 250_000}));
    let capabilities = client.execute(json!({"execute": "qmp_capabilities", "id": 1}));
    assert_eq!(capabilities, json!({"return": {}, "id": 1}));
    let status = client.execute(json!({"execute": "query-status", "id": "mine"}));
    assert_eq!(status, json!({"return": {"status": "running", "running": true}, "id": "mine"}));
    // QEMU's error, and a refusal of libvirt.
    let unknown = client.execute(json!({"execute": "bogus", "id": 3}));
    assert_eq!((&unknown["error"]["class"], &unknown["id"]), (&json!("GenericError"), &json!(3)));
    assert!(client.execute(json!([1]))["error"]["desc"].is_string());
    assert!(!daemon.mood.lock().unwrap().qemu.executed.contains(&"qmp_capabilities".to_owned()));
}

#[test]
fn descriptor_reaches_qemu_through_libvirts_monitor() {
    let daemon = Daemon::start(|_| {});
    let (_door, mut client) = open(&daemon);
    let (ours, theirs) = UnixStream::pair().unwrap();

    let line = format!("{}\n", json!({"execute": "getfd", "arguments": {"fdname": "x"}, "id": 1}));
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let files = [theirs.as_fd()];
    control.push(rustix::net::SendAncillaryMessage::ScmRights(&files));
    let parts = [std::io::IoSlice::new(line.as_bytes())];
    rustix::net::sendmsg(&client.stream, &parts, &mut control, rustix::net::SendFlags::empty()).unwrap();

    assert_eq!(client.next(), json!({"return": {}, "id": 1}));
    let named = daemon.mood.lock().unwrap().qemu.named.remove("x").unwrap();
    UnixStream::from(named).write_all(b"here\n").unwrap();
    let mut line = String::new();
    BufReader::new(ours).read_line(&mut line).unwrap();
    assert_eq!(line, "here\n");
}

#[test]
fn new_qemu_gets_a_monitor_of_its_own_until_the_door_closes() {
    let daemon = Daemon::start(new_qemu);
    let (door, mut client) = open(&daemon);

    assert!(door.is_own_monitor());
    assert_eq!(client.execute(json!({"execute": "x", "id": 1}))["return"], "own");
    assert_eq!(daemon.mood.lock().unwrap().qemu.devices.lock().unwrap().len(), 1);
    drop(client);
    drop(door);

    let mood = daemon.mood.lock().unwrap();
    assert!(mood.qemu.devices.lock().unwrap().is_empty() && mood.qemu.monitors.lock().unwrap().is_empty());
    assert!(mood.qemu.named.is_empty());
}

#[test]
fn monitor_that_does_not_greet_is_removed_and_libvirts_is_used() {
    let daemon = Daemon::start(|mood| {
        new_qemu(mood);
        mood.qemu.is_mute = true;
    });

    let (door, mut client) = open(&daemon);

    assert!(!door.is_own_monitor());
    assert_eq!(client.execute(json!({"execute": "query-status"}))["return"]["status"], "running");
    let mood = daemon.mood.lock().unwrap();
    assert!(mood.qemu.devices.lock().unwrap().is_empty() && mood.qemu.monitors.lock().unwrap().is_empty());
}

#[test]
fn parts_that_a_killed_command_has_left_are_removed_and_those_of_a_running_one_are_not() {
    let daemon = Daemon::start(new_qemu);
    {
        let mood = daemon.mood.lock().unwrap();
        let mut devices = mood.qemu.devices.lock().unwrap();
        let device = |is_closed| Device { end: None, is_closed };
        devices.insert("sterna-door-1-0".into(), device(true));
        devices.insert("sterna-door-2-0".into(), device(false));
        devices.insert("charserial0".into(), device(true));
        mood.qemu.monitors.lock().unwrap().push("sterna-door-1-0".into());
    }

    let (door, client) = open(&daemon);
    drop(client);
    drop(door);

    let mood = daemon.mood.lock().unwrap();
    let mut left: Vec<String> = mood.qemu.devices.lock().unwrap().keys().cloned().collect();
    left.sort();
    assert_eq!(left, ["charserial0", "sterna-door-2-0"]);
    assert!(mood.qemu.monitors.lock().unwrap().is_empty());
}

#[test]
fn door_that_closes_during_a_command_does_not_wait_for_it() {
    let daemon = Daemon::start(|_| {});
    let (door, mut client) = open(&daemon);
    // The reply to this command does not arrive before a second one.
    daemon.mood.lock().unwrap().late = true;
    writeln!(client.stream, "{}", json!({"execute": "query-status"})).unwrap();
    while daemon.mood.lock().unwrap().qemu.executed.len() < 2 {
        std::thread::yield_now();
    }

    // A door that waited for the command's limit of 70 s would end the test by its own limit.
    drop(door);
    assert_eq!(client.next(), Value::Null);
}
