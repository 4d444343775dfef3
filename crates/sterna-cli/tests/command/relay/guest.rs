//! A guest that migrates through two relays, and what they show of it.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::{Client, Endpoint};

use super::Relay;
use crate::exposition;

const RAM_BYTES: f64 = (64 << 20) as f64;

struct Vm(Child, String);

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Vm {
    fn start(directory: &std::path::Path, name: &str, more: &[&str]) -> Self {
        let socket = format!("unix:{}", directory.join(format!("{name}.qmp")).display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        // A rate that any host can copy. A guest at full speed may never converge.
        command.args([
            "run",
            "--ram=64M",
            "--fill=random",
            "--machine=process",
            "--rate=1000",
            "--qmp",
            &socket,
        ]);
        command.arg(format!("--exit-with-parent={}", std::process::id())).args(more);
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap(), socket)
    }

    fn client(&self) -> Client {
        let endpoint: Endpoint = self.1.parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match Client::connect(&endpoint, Duration::from_secs(10)) {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn relays_show_the_migration_of_a_guest() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().to_str().unwrap();
    let metrics = ["--metrics", "127.0.0.1:0", "--report", at];
    let acceptor = Relay::start(&[&["listen:tcp:127.0.0.1:0", "--route-dir", at][..], &metrics].concat());
    let (listen, to) = (format!("listen:unix:{at}/source"), format!("{}/web1", acceptor.address));
    let dialer = Relay::start(&[&[listen.as_str(), "--to", &to][..], &metrics].concat());
    let (a, b) =
        (Vm::start(directory.path(), "a", &[]), Vm::start(directory.path(), "b", &["--incoming=defer"]));
    let (mut source, mut target) = (a.client(), b.client());
    target.execute("migrate-incoming", json!({"uri": format!("unix:{at}/web1.sock")})).unwrap();

    source.execute("migrate", json!({"uri": format!("unix:{at}/source")})).unwrap();

    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let status = source.execute("query-migrate", json!({})).unwrap()["status"].clone();
        match status.as_str() {
            Some("completed") => break,
            Some("failed") => panic!("{}", source.execute("query-migrate", json!({})).unwrap()),
            _ => assert!(Instant::now() < deadline, "{status}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    for (relay, role) in [(dialer, "source"), (acceptor, "destination")] {
        // The source's VM may know of its completion before the relays do.
        let ended = [("role", role), ("phase", "ended")];
        let page = loop {
            let page = exposition::fetch(relay.metrics());
            if page.value("sterna_migration_phase", &ended) == Some(1.0) {
                break page;
            }
            assert!(Instant::now() < deadline, "{page:?}");
            std::thread::sleep(Duration::from_millis(10));
        };
        let value = |name: &str| page.value(&format!("sterna_migration_{name}"), &[("role", role)]);
        assert!(value("data_total_bytes") >= Some(RAM_BYTES), "{page:?}");
        assert!(value("data_processed_bytes") >= Some(RAM_BYTES), "{page:?}");
        assert_eq!(value("data_remaining_bytes"), Some(0.0), "{page:?}");
        assert!(value("round") >= Some(1.0) && value("downtime_seconds") > Some(0.0), "{page:?}");
        relay.signal();
        let (status, said) = relay.end();
        assert!(status == Some(0) && said.contains("RAM, round 1"), "{status:?} {said}");
    }
    let mut roles = Vec::new();
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "json") {
            let record: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            assert!(
                record["ram_bytes"].as_f64() >= Some(RAM_BYTES) && record["in_order"] == true,
                "{record}"
            );
            assert!(record["parts"].as_array().is_some_and(|parts| !parts.is_empty()), "{record}");
            roles.push(record["role"].as_str().unwrap().to_owned());
        }
    }
    roles.sort_unstable();
    assert_eq!(roles, ["destination", "source"]);
}

#[test]
fn migrate_through_a_relay_inside_the_command_moves_the_guest() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().to_str().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, [7; 32]).unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let secret = ["--secret", secret.to_str().unwrap()];
    let acceptor = Relay::start(&[&["listen:tcp:127.0.0.1:0", "--route-dir", at][..], &secret].concat());
    let (a, b) =
        (Vm::start(directory.path(), "a", &[]), Vm::start(directory.path(), "b", &["--incoming=defer"]));
    let (mut source, mut target) = (a.client(), b.client());
    let migrate = |route: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["migrate", &a.1, &format!("unix:{at}/web1.sock"), "--dest-qmp", &b.1]);
        command.args([
            "--via",
            &format!("{}/{route}", acceptor.address),
            "--via-secret",
            secret[1],
            "--json",
        ]);
        command.args(["--via-compress", "auto", "--via-reconnect-window", "5"]);
        command.output().unwrap()
    };

    let refused = migrate("other");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("route"), "{said}");
    assert_eq!(source.execute("query-status", json!({})).unwrap()["status"], "running");

    let moved = migrate("web1");

    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(moved.status.success(), "{said}");
    let record: Value = serde_json::from_slice(&moved.stdout).unwrap();
    assert_eq!(record["statistics"]["status"], "completed", "{record}");
    assert!(record["destination"].as_str().is_some_and(|text| text.contains("via tcp:")), "{record}");
    assert_eq!(target.execute("query-status", json!({})).unwrap()["status"], "running");
    assert_eq!(source.execute("query-status", json!({})).unwrap()["status"], "postmigrate");
    acceptor.signal();
    let (status, said) = acceptor.end();
    assert_eq!(status, Some(0), "{said}");
}
