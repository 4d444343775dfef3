//! Postcopy whose source dies: what the destination's VM answers, and that it can be ended.

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
        let mut pair = Self { _directory: directory, source, destination, here, there };
        let on: Value = capabilities.iter().map(|name| json!({"capability": name, "state": true})).collect();
        let on = json!({ "capabilities": on });
        pair.there.execute("migrate-set-capabilities", on.clone()).ok()?;
        pair.there.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
        let address = pair.there.execute("query-migrate", json!({})).unwrap()["socket-address"][0].clone();
        let uri = format!("tcp:127.0.0.1:{}", address["port"].as_str().unwrap());
        pair.here.execute("migrate-set-capabilities", on).unwrap();
        pair.here.execute("migrate-set-parameters", parameters).unwrap();
        pair.here.execute("migrate", json!({"uri": uri})).unwrap();
        pair.here.execute("migrate-start-postcopy", json!({})).unwrap();
        Some(pair)
    }
}

fn status(client: &mut Client) -> String {
    client.execute("query-migrate", json!({})).unwrap()["status"].as_str().unwrap().to_owned()
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

        let there = &mut pair.there;
        eventually("the pause", || (status(there) == "postcopy-paused").then_some(()));
        assert!(there.execute("stop", json!({})).is_err(), "it would wait with the guest");
        assert!(there.execute("migrate_cancel", json!({})).is_err());
        there.execute("quit", json!({})).unwrap();
        let end = eventually("its end", || pair.destination.try_wait().unwrap());
        assert_eq!(end.code(), Some(1), "the guest is lost");
    }
}
