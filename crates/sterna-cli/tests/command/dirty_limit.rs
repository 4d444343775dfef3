//! Dirty limits and dirty rates of single vCPUs, over the monitor of a running VM.
#![allow(clippy::print_stderr, reason = "a test that cannot run here says so")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};

const LIMIT: Duration = Duration::from_secs(60);

/// A VM that is killed when the test ends.
struct Machine {
    child: Child,
    client: Client,
    _directory: tempfile::TempDir,
}

impl Machine {
    /// Starts a VM with two vCPUs that write. None: this host cannot run it.
    fn start(test: &str, arguments: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let (socket, said) = (directory.path().join("qmp"), directory.path().join("said"));
        let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["run", "--ram=64M", "--vcpus=2"])
            .args(arguments)
            .arg(format!("--qmp=unix:{}", socket.display()))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        let client = connect(&mut child, socket);
        let Some(client) = client else {
            let said = std::fs::read_to_string(said).unwrap();
            assert!(said.contains("KVM") || said.contains("dirty"), "{said}");
            eprintln!("SKIPPED {test}: {}", said.trim());
            return None;
        };
        Some(Self { child, client, _directory: directory })
    }

    fn ok(&mut self, command: &str, arguments: Value) -> Value {
        self.client.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    }
}

/// Connects to the monitor. None: the VM has exited.
fn connect(child: &mut Child, socket: PathBuf) -> Option<Client> {
    let (endpoint, begin) = (Endpoint::Unix(socket), Instant::now());
    loop {
        match Client::connect(&endpoint, LIMIT) {
            Ok(client) => return Some(client),
            Err(error) => assert!(begin.elapsed() < LIMIT, "no monitor: {error}"),
        }
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A VM of each kind that can limit dirty rates.
fn machines(test: &str) -> Vec<Machine> {
    let kinds: [&[&str]; 2] = [&["--machine=process"], &["--machine=kvm", "--dirty-ring-size=4096"]];
    kinds.iter().filter_map(|arguments| Machine::start(test, arguments)).collect()
}

#[test]
fn dirty_limit_of_one_vcpu_is_set_shown_and_taken_back_while_nothing_migrates() {
    for mut vm in machines("dirty_limit_of_one_vcpu_is_set_shown_and_taken_back_while_nothing_migrates") {
        assert_eq!(vm.ok("query-vcpu-dirty-limit", Value::Null), json!([]));

        vm.ok("set-vcpu-dirty-limit", json!({"cpu-index": 1, "dirty-rate": 40}));

        let limits = vm.ok("query-vcpu-dirty-limit", Value::Null);
        let limits: Vec<_> =
            limits.as_array().unwrap().iter().map(|its| (&its["cpu-index"], &its["limit-rate"])).collect();
        assert_eq!(limits, [(&json!(1), &json!(40))]);
        let refusal = vm.client.execute("set-vcpu-dirty-limit", json!({"cpu-index": 2, "dirty-rate": 40}));
        assert!(refusal.unwrap_err().to_string().contains("2 vCPUs"));
        vm.ok("cancel-vcpu-dirty-limit", json!({"cpu-index": 1}));
        assert_eq!(vm.ok("query-vcpu-dirty-limit", Value::Null), json!([]));
    }
}

#[test]
fn calc_dirty_rate_of_a_machine_that_counts_names_every_vcpu_and_a_ring_only_where_there_is_one() {
    let test = "calc_dirty_rate_of_a_machine_that_counts_names_every_vcpu_and_a_ring_only_where_there_is_one";
    for mut vm in machines(test) {
        let has_ring = vm.ok("query-kvm", Value::Null)["enabled"] == true;
        vm.ok("calc-dirty-rate", json!({"calc-time": 300, "calc-time-unit": "millisecond"}));

        let begin = Instant::now();
        let answer = loop {
            let answer = vm.ok("query-dirty-rate", Value::Null);
            if answer["status"] != "measuring" {
                break answer;
            }
            assert!(begin.elapsed() < LIMIT, "{answer}");
            std::thread::sleep(Duration::from_millis(10));
        };

        let mode = if has_ring { "dirty-ring" } else { "dirty-bitmap" };
        assert_eq!((&answer["status"], &answer["mode"]), (&json!("measured"), &json!(mode)), "{answer}");
        let rates = answer["vcpu-dirty-rate"].as_array().unwrap();
        assert_eq!(rates.iter().map(|rate| &rate["id"]).collect::<Vec<_>>(), [0, 1], "{answer}");
    }
}
