//! Postcopy of two VMs: waits, sides that die or are paused, recovery by command, and the plan's forecast.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};

fn run(machine: &str, arguments: &[&str], socket: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(["run", "--ram=64M", "--vcpus=4", "--fill=random", "--qmp", socket, "--machine", machine]);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn client(socket: &str) -> Client {
    let endpoint: Endpoint = socket.parse().unwrap();
    eventually("a monitor", || Client::connect(&endpoint, Duration::from_secs(10)).ok())
}

/// Two VMs, and their monitors.
struct Pair {
    _directory: tempfile::TempDir,
    /// The address at which the destination listens.
    uri: String,
    source: Child,
    destination: Child,
    here: Client,
    there: Client,
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in [&mut self.source, &mut self.destination] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Pair {
    /// A pair in postcopy with these capabilities. `None` if this host forbids it.
    fn in_postcopy(machine: &str, capabilities: &[&str], parameters: Value) -> Option<Self> {
        Self::in_postcopy_over(machine, capabilities, parameters, |port| format!("tcp:127.0.0.1:{port}"))
    }

    /// As [`Pair::in_postcopy`]. `way` makes the address that leads to the destination's port.
    fn in_postcopy_over(
        machine: &str,
        capabilities: &[&str],
        parameters: Value,
        way: impl Fn(u16) -> String,
    ) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{}", directory.path().join(name).display());
        let source = run(machine, &[], &socket("a"));
        let destination = run(machine, &["--incoming=defer"], &socket("b"));
        let (here, there) = (client(&socket("a")), client(&socket("b")));
        let mut pair = Self { _directory: directory, uri: String::new(), source, destination, here, there };
        let on: Value = capabilities
            .iter()
            .chain([&"events"])
            .map(|name| json!({"capability": name, "state": true}))
            .collect();
        let on = json!({ "capabilities": on });
        pair.there.execute("migrate-set-capabilities", on.clone()).ok()?;
        pair.there.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
        let address = pair.there.execute("query-migrate", json!({})).unwrap()["socket-address"][0].clone();
        let port = address["port"].as_str().unwrap().parse().unwrap();
        let uri = format!("tcp:127.0.0.1:{port}");
        pair.here.execute("migrate-set-capabilities", on).unwrap();
        pair.here.execute("migrate-set-parameters", parameters).unwrap();
        pair.here.execute("migrate", json!({"uri": way(port)})).unwrap();
        pair.uri = uri;
        pair.here.execute("migrate-start-postcopy", json!({})).unwrap();
        Some(pair)
    }
}

fn status(client: &mut Client) -> String {
    client.execute("query-migrate", json!({})).unwrap()["status"].as_str().unwrap().to_owned()
}

/// Waits for a warning that contains `word`.
fn warning(client: &mut Client, word: &str) -> String {
    loop {
        let event = client.next_event(Duration::from_secs(60)).unwrap().expect("it never warned");
        let said = event.data["warning"].as_str().filter(|said| said.contains(word));
        if let Some(said) = said {
            return said.to_owned();
        }
    }
}

#[test]
fn blocktime_is_told_of_every_vcpu_under_qemus_names() {
    if !std::path::Path::new("/dev/kvm").exists() {
        return;
    }
    let capabilities = ["postcopy-ram", "postcopy-preempt", "postcopy-blocktime"];
    let slowly = json!({"max-bandwidth": 10_000_000});
    let Some(mut pair) = Pair::in_postcopy("kvm", &capabilities, slowly) else { return };
    eventually("the end", || (status(&mut pair.there) == "completed").then_some(()));

    let told = pair.there.execute("query-migrate", json!({})).unwrap();
    let of_vcpus = |name: &str| told[name].as_array().unwrap().iter().filter_map(Value::as_u64).count();
    assert_eq!((of_vcpus("postcopy-vcpu-blocktime"), of_vcpus("postcopy-vcpu-latency")), (4, 4), "{told}");
    let waits: u64 = told["postcopy-latency-dist"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert!(waits > 0 && told["postcopy-latency"].as_u64().unwrap() > 0, "{told}");
    assert!(told["postcopy-blocktime"].is_u64() && told["postcopy-non-vcpu-latency"].is_u64(), "{told}");
    let cpus = pair.there.execute("query-cpus-fast", json!({})).unwrap();
    assert!(cpus.as_array().unwrap().iter().all(|cpu| cpu["thread-id"].as_i64().unwrap() > 0), "{cpus}");
}

#[test]
fn guest_whose_source_dies_in_postcopy_waits_and_its_vm_answers_and_can_be_ended() {
    for machine in ["process", "kvm"] {
        if machine == "kvm" && !std::path::Path::new("/dev/kvm").exists() {
            continue;
        }
        let slowly = json!({"max-bandwidth": 10_000_000, "max-postcopy-bandwidth": 100_000});
        let Some(mut pair) = Pair::in_postcopy(machine, &["postcopy-ram"], slowly) else { return };
        eventually("postcopy", || (status(&mut pair.there) == "postcopy-active").then_some(()));

        pair.source.kill().unwrap();
        pair.source.wait().unwrap();

        eventually("the pause", || (status(&mut pair.there) == "postcopy-paused").then_some(()));
        let said = warning(&mut pair.there, "the connection to the source broke");
        assert!(said.contains("only the source has") && said.contains("Keep both processes"), "{said}");
        let there = &mut pair.there;
        assert!(there.execute("stop", json!({})).is_err(), "it would wait with the guest");
        assert!(there.execute("migrate_cancel", json!({})).is_err());
        there.execute("quit", json!({})).unwrap();
        let end = eventually("its end", || pair.destination.try_wait().unwrap());
        assert_eq!(end.code(), Some(1), "the guest is lost");
    }
}

/// The destination's pages, and the guest's writes there, are lost. The source has an outdated copy and never
/// runs it.
#[test]
fn guest_whose_destination_dies_in_postcopy_is_lost_and_its_source_never_runs_it() {
    for machine in ["process", "kvm"] {
        if machine == "kvm" && !std::path::Path::new("/dev/kvm").exists() {
            continue;
        }
        let slowly = json!({
            "max-bandwidth": 10_000_000, "max-postcopy-bandwidth": 100_000, "x-sterna-reconnect-window": 60_000,
        });
        let Some(mut pair) = Pair::in_postcopy(machine, &["postcopy-ram"], slowly) else { return };
        eventually("postcopy", || (status(&mut pair.here) == "postcopy-active").then_some(()));

        pair.destination.kill().unwrap();
        pair.destination.wait().unwrap();

        // The source tries to reconnect meanwhile, so both statuses are possible.
        let lost = ["postcopy-paused", "postcopy-recover"];
        eventually("the pause", || lost.contains(&status(&mut pair.here).as_str()).then_some(()));
        let said = warning(&mut pair.here, "postcopy-paused: ");
        assert!(
            said.contains("only it has these pages") && said.contains("does not run here any more"),
            "{said}"
        );
        assert!(pair.here.execute("cont", json!({})).is_err(), "it has run elsewhere");
        assert!(pair.here.execute("migrate_cancel", json!({})).is_err());
        assert!(pair.here.execute("x-sterna-decide", json!({"guest": "source"})).is_err());
        let runs = pair.here.execute("query-status", json!({})).unwrap();
        assert_eq!(runs["running"], false, "{runs}");
        pair.here.execute("x-sterna-decide", json!({"guest": "destination"})).unwrap();
        eventually("the end", || (status(&mut pair.here) == "completed").then_some(()));
        assert!(pair.here.execute("cont", json!({})).is_err(), "its memory is given up");
    }
}

/// A relay to the destination that can be cut. After the cut, no connection gets through.
struct Cable {
    at: String,
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Cable {
    fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port());
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let streams = Arc::clone(&open);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(("127.0.0.1", port))) else { return };
                let mut streams = streams.lock().unwrap();
                let Some(streams) = streams.as_mut() else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let mut piece = [0; 16 << 10];
                        while let Ok(count @ 1..) = from.read(&mut piece) {
                            if to.write_all(&piece[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                streams.extend([near, far]);
            }
        });
        Self { at, open }
    }

    fn cut(&self) {
        let streams = self.open.lock().unwrap().take().unwrap();
        streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
}

#[test]
fn postcopy_that_is_paused_on_either_side_goes_on_when_it_is_resumed() {
    for at_the_source in [true, false] {
        let slowly = json!({
            "max-bandwidth": 10_000_000, "max-postcopy-bandwidth": 100_000, "x-sterna-reconnect-window": 60_000,
        });
        let Some(mut pair) = Pair::in_postcopy("process", &["postcopy-ram"], slowly) else { return };
        for client in [&mut pair.here, &mut pair.there] {
            eventually("postcopy", || (status(client) == "postcopy-active").then_some(()));
        }
        let client = if at_the_source { &mut pair.here } else { &mut pair.there };
        client.execute("migrate-pause", json!({})).unwrap();
        for client in [&mut pair.here, &mut pair.there] {
            eventually("the pause", || (status(client) == "postcopy-paused").then_some(()));
        }
        pair.here.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": 0})).unwrap();
        pair.here.execute("migrate", json!({"uri": pair.uri, "resume": true})).unwrap();
        for client in [&mut pair.here, &mut pair.there] {
            eventually("the end", || (status(client) == "completed").then_some(()));
        }
    }
}

#[test]
fn broken_connection_is_told_once_with_the_command_that_recovers_it() {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| format!("unix:{}", directory.path().join(name).display());
    let source = run("process", &[], &socket("a"));
    let destination = run("process", &["--incoming=defer"], &socket("b"));
    let (here, there) = (client(&socket("a")), client(&socket("b")));
    let uri = "tcp:127.0.0.1:0".to_owned();
    let mut pair = Pair { _directory: directory, source, destination, here, there, uri };
    let on: Value = ["postcopy-ram", "postcopy-preempt"]
        .iter()
        .map(|name| json!({"capability": name, "state": true}))
        .collect();
    if pair.there.execute("migrate-set-capabilities", json!({ "capabilities": on })).is_err() {
        return;
    }
    pair.there.execute("migrate-incoming", json!({"uri": pair.uri})).unwrap();
    let port = pair.there.execute("query-migrate", json!({})).unwrap()["socket-address"][0]["port"].clone();
    let port: u16 = port.as_str().unwrap().parse().unwrap();
    let cable = Cable::to(port);
    let a = format!("unix:{}", pair._directory.path().join("a").display());
    let mut migrate = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["migrate", &a, &cable.at, "--postcopy", "0", "--undecided-wait", "100"])
        .args(["--set", "max-bandwidth=10000000", "--set", "max-postcopy-bandwidth=100000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("postcopy", || (status(&mut pair.there) == "postcopy-active").then_some(()));
    eventually("postcopy", || (status(&mut pair.here) == "postcopy-active").then_some(()));

    cable.cut();

    eventually("the pause", || (status(&mut pair.here) == "postcopy-paused").then_some(()));
    eventually("the pause", || (status(&mut pair.there) == "postcopy-paused").then_some(()));
    let said = format!("`sterna recover {a} {}` continues the migration", cable.at);
    let (mut from, mut told) = (migrate.stderr.take().unwrap(), Vec::new());
    while !String::from_utf8_lossy(&told).contains(&said) {
        let mut piece = [0; 256];
        let count = from.read(&mut piece).unwrap();
        assert!(count > 0, "it ended: {}", String::from_utf8_lossy(&told));
        told.extend(&piece[..count]);
    }
    let recovered = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["recover", &a, &format!("tcp:127.0.0.1:{port}")])
        .output()
        .unwrap();
    let theirs = pair.there.execute("query-migrate", json!({})).unwrap();
    assert!(recovered.status.success(), "{recovered:?}; the destination says {theirs}");
    while !String::from_utf8_lossy(&told).contains("connected again in postcopy") {
        let mut piece = [0; 256];
        let count = from.read(&mut piece).unwrap();
        assert!(count > 0, "it ended: {}", String::from_utf8_lossy(&told));
        told.extend(&piece[..count]);
    }
    pair.here.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": 0})).unwrap();
    let ended = migrate.wait_with_output().unwrap();
    from.read_to_end(&mut told).unwrap();
    let (told, shown) = (String::from_utf8_lossy(&told), String::from_utf8_lossy(&ended.stdout));
    assert!(ended.status.success(), "{told}\n{shown}");
    assert_eq!(told.matches(&said).count(), 1, "{told}");
    assert_eq!(told.matches("connected again").count(), 1, "{told}");
    let line = |name: &str| shown.lines().find(|line| line.trim().starts_with(name)).unwrap_or_default();
    assert!(line("postcopy ").contains("switch after") && line("postcopy ").contains("missing"), "{shown}");
    assert!(line("page faults").contains("(p50)"), "{shown}");
    assert!(line("paused in postcopy").contains("once for"), "{shown}");
    assert!(told.contains("the guest runs at the destination"), "{told}");
    assert_eq!((status(&mut pair.here), status(&mut pair.there)), ("completed".into(), "completed".into()));
    // Nothing is left to recover, and the command reports the migration's status.
    let again = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["recover", &a, &format!("tcp:127.0.0.1:{port}"), "--patience", "0"])
        .output()
        .unwrap();
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("its migration is completed"), "{again:?}");
}

#[test]
fn plan_of_a_vm_says_why_postcopy_cannot_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("a").display());
    let mut vm = run("process", &[], &socket);
    let mut monitor = client(&socket);
    let mut plan = |capability: Option<&str>, to: &str| {
        let set = |monitor: &mut Client, on: bool| {
            let on: Value = capability.iter().map(|name| json!({"capability": name, "state": on})).collect();
            monitor.execute("migrate-set-capabilities", json!({ "capabilities": on })).unwrap();
        };
        set(&mut monitor, true);
        let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["plan", &socket, "--bandwidth=1MB/s", "--dirty-rate=1GB/s", "--json", "--to", to])
            .output()
            .unwrap();
        set(&mut monitor, false);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let possible = plan(None, "tcp:127.0.0.1:1");
    let advice = |plan: &Value| plan["advice"].to_string().contains("postcopy-ram");
    assert!(
        advice(&possible)
            && possible["forecast"]["postcopy"]["degraded_time"]["expected"].as_f64() > Some(1.0)
    );
    for (capability, to, why) in [
        (Some("xbzrle"), "tcp:127.0.0.1:1", "xbzrle"),
        (Some("mapped-ram"), "tcp:127.0.0.1:1", "mapped-ram"),
        (None, "file:/nowhere", "file:"),
        (None, "rdma:127.0.0.1:1", "rdma:"),
    ] {
        let refused = plan(capability, to);
        let said = refused["inputs"]["postcopy"]["excluded"].as_str().unwrap_or_default().to_owned();
        assert!(said.contains(why) && !advice(&refused), "{refused}");
        assert!(refused["forecast"]["postcopy"].is_null(), "{refused}");
    }
    let _ = vm.kill();
    let _ = vm.wait();
}

/// A way to the destination that breaks instead of forwarding the report of the guest's start.
fn loses_the_report(port: u16) -> String {
    const STARTED: [u8; 8] = [0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x20];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        let (mut from, mut to, mut piece, mut seen) = (&far, &near, [0; 16 << 10], Vec::new());
        while let Ok(count @ 1..) = from.read(&mut piece) {
            seen.extend_from_slice(&piece[..count]);
            let is_report = seen.windows(STARTED.len()).any(|window| window == STARTED);
            if is_report || to.write_all(&piece[..count]).is_err() {
                break;
            }
        }
        for side in [&near, &far] {
            let _ = side.shutdown(Shutdown::Both);
        }
    });
    at
}

#[test]
fn decision_about_an_undecided_postcopy_keeps_the_pages_and_names_the_command_that_sends_them() {
    let decide = |socket: &str| {
        let command = &mut Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["decide", socket, "destination"]).output().unwrap()
    };
    for gives_up in [false, true] {
        let slowly = json!({
            "max-bandwidth": 10_000_000, "max-postcopy-bandwidth": 100_000, "x-sterna-status-question": "operator",
        });
        let pair = Pair::in_postcopy_over("process", &["postcopy-ram"], slowly, loses_the_report);
        let Some(mut pair) = pair else { return };
        let is_undecided = |client: &mut Client| {
            let query = client.execute("query-migrate", json!({})).unwrap();
            (query["x-sterna-undecided"] == true).then_some(())
        };
        eventually("the loss", || is_undecided(&mut pair.here));
        eventually("the pause", || (status(&mut pair.there) == "postcopy-paused").then_some(()));
        let a = format!("unix:{}", pair._directory.path().join("a").display());
        // An operator who saw another status decided about something else.
        let other = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["decide", &a, "destination", "--expect", "postcopy-paused"])
            .output()
            .unwrap();
        assert_eq!(other.status.code(), Some(1), "{other:?}");
        is_undecided(&mut pair.here).expect("nothing has changed");

        let decided = decide(&a);

        let said = String::from_utf8_lossy(&decided.stderr);
        assert_eq!(decided.status.code(), Some(3), "{said}");
        assert!(said.contains(&format!("`sterna recover {a} ADDRESS`")), "{said}");
        assert_eq!(status(&mut pair.here), "postcopy-paused");
        if gives_up {
            let decided = decide(&a);
            assert!(decided.status.success(), "{decided:?}");
            assert_eq!(status(&mut pair.here), "completed");
            assert_eq!(status(&mut pair.there), "postcopy-paused", "it lacks pages");
            continue;
        }
        pair.here.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": 0})).unwrap();
        let recovered =
            Command::new(env!("CARGO_BIN_EXE_sterna")).args(["recover", &a, &pair.uri]).output().unwrap();
        assert!(recovered.status.success(), "{recovered:?}");
        for client in [&mut pair.here, &mut pair.there] {
            eventually("the end", || (status(client) == "completed").then_some(()));
        }
    }
}
