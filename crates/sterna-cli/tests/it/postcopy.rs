//! Postcopy whose source or destination dies, or is paused: what the other side's VM says and answers, and that it can be ended.

use std::process::{Child, Command, Stdio};
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
    /// Where the destination listens.
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
    /// In postcopy with these capabilities. `None` where this host forbids it.
    fn in_postcopy(machine: &str, capabilities: &[&str], parameters: Value) -> Option<Self> {
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
        let uri = format!("tcp:127.0.0.1:{}", address["port"].as_str().unwrap());
        pair.here.execute("migrate-set-capabilities", on).unwrap();
        pair.here.execute("migrate-set-parameters", parameters).unwrap();
        pair.here.execute("migrate", json!({"uri": uri})).unwrap();
        pair.uri = uri;
        pair.here.execute("migrate-start-postcopy", json!({})).unwrap();
        Some(pair)
    }
}

fn status(client: &mut Client) -> String {
    client.execute("query-migrate", json!({})).unwrap()["status"].as_str().unwrap().to_owned()
}

/// The warning with this word.
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
        assert!(said.contains("are only there") && said.contains("Keep both processes"), "{said}");
        let there = &mut pair.there;
        assert!(there.execute("stop", json!({})).is_err(), "it would wait with the guest");
        assert!(there.execute("migrate_cancel", json!({})).is_err());
        there.execute("quit", json!({})).unwrap();
        let end = eventually("its end", || pair.destination.try_wait().unwrap());
        assert_eq!(end.code(), Some(1), "the guest is lost");
    }
}

/// What the destination had, and the guest wrote there, is lost. The source has the guest's past, and never runs it.
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

        // It tries to connect again meanwhile.
        let lost = ["postcopy-paused", "postcopy-recover"];
        eventually("the pause", || lost.contains(&status(&mut pair.here).as_str()).then_some(()));
        let said = warning(&mut pair.here, "postcopy-paused: ");
        assert!(said.contains("it alone has them") && said.contains("does not run here any more"), "{said}");
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
