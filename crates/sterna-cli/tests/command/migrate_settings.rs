//! `sterna migrate` restores the settings that it changes, however it ends, and reports whether the guest has
//! arrived.

use std::net::TcpListener;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::save::Process;

const STERNA: &str = env!("CARGO_BIN_EXE_sterna");
/// A write rate that any host can copy. A guest at full speed may never converge.
const SLOWLY: &str = "--rate=1000";

struct Pair {
    _directory: tempfile::TempDir,
    a: Process,
    b: Process,
}

impl Pair {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let a = Process::start(directory.path().join("a"), &[SLOWLY]);
        let b = Process::start(directory.path().join("b"), &["--incoming=defer"]);
        Self { _directory: directory, a, b }
    }

    fn migrate(&self, to: &str, more: &[&str]) -> Output {
        let line = ["migrate", &self.a.socket(), to, "--dest-qmp", &self.b.socket()];
        Command::new(STERNA).args(line).args(more).output().unwrap()
    }
}

/// Capabilities, parameters and objects of a VM.
fn settings(vm: &Process) -> [Value; 3] {
    let objects = ("qom-list", json!({"path": "/objects"}));
    [("query-migrate-capabilities", Value::Null), ("query-migrate-parameters", Value::Null), objects]
        .map(|(command, arguments)| vm.vm().execute(command, arguments).unwrap())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn migration_that_is_refused_leaves_both_sides_as_they_were_and_the_next_one_arrives() {
    let pair = Pair::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:127.0.0.1:{}", taken.local_addr().unwrap().port());
    let before = [settings(&pair.a), settings(&pair.b)];
    let free = "tcp:127.0.0.1:0";
    for (to, more, status) in [
        // Refused by the destination.
        (
            taken.as_str(),
            &["--cap", "multifd", "--set", "multifd-channels=4", "--set", "max-bandwidth=5M"][..],
            1,
        ),
        // Refused by the source, after its capabilities were set.
        (free, &["--postcopy", "0", "--set", "max-cpu-throttle=200"], 2),
        (free, &["--reconnect-window", "5", "--cap", "multifd", "--set", "multifd-channels=0"], 2),
        // Refused by the source when the destination already listens.
        (free, &["--cap", "xbzrle", "--set", "downtime-limit=7"], 1),
    ] {
        let output = pair.migrate(to, more);

        assert_eq!(output.status.code(), Some(status), "{more:?}: {}", said(&output));
        assert_eq!([settings(&pair.a), settings(&pair.b)], before, "{more:?}");
        let waits = pair.b.vm().execute("query-migrate", Value::Null).unwrap();
        assert_ne!(waits["status"], "setup", "{more:?}: the destination listens");
        assert_eq!(pair.a.vm().run_state().unwrap(), "running", "{more:?}");
    }

    let output = pair.migrate(free, &[]);

    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(pair.b.vm().run_state().unwrap(), "running");
}

#[test]
fn migration_that_arrives_leaves_no_settings_unless_they_are_to_stay() {
    for (more, stays) in [(&[][..], false), (&["--keep-settings"], true)] {
        let pair = Pair::new();
        let before = [settings(&pair.a), settings(&pair.b)];
        let set = ["--cap", "multifd", "--set", "multifd-channels=3", "--set", "max-bandwidth=0"];

        let output = pair.migrate("tcp:127.0.0.1:0", &[&set, more].concat());

        assert!(output.status.success(), "{}", said(&output));
        let after = [settings(&pair.a), settings(&pair.b)];
        if stays {
            for side in after {
                assert_eq!(side[1]["multifd-channels"], 3);
                assert!(
                    side[0].as_array().unwrap().contains(&json!({"capability": "multifd", "state": true}))
                );
            }
        } else {
            assert_eq!(after, before);
        }
    }
}

#[test]
fn settings_that_differ_are_refused_before_the_destination_listens() {
    let pair = Pair::new();
    let on = json!({"capabilities": [{"capability": "multifd", "state": true}]});
    pair.a.vm().execute("migrate-set-capabilities", on).unwrap();

    let output = pair.migrate("tcp:127.0.0.1:0", &[]);

    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("multifd is on at") && said.contains("--cap multifd"), "{said}");
    assert_eq!(pair.b.vm().execute("query-migrate", Value::Null).unwrap(), json!({}));
    assert!(pair.migrate("tcp:127.0.0.1:0", &["--cap", "multifd"]).status.success());
}

#[test]
fn source_without_a_guest_is_refused_before_the_destination_listens() {
    let pair = Pair::new();
    let line = ["migrate", &pair.b.socket(), "tcp:127.0.0.1:0", "--dest-qmp", &pair.a.socket()];

    let output = Command::new(STERNA).args(line).output().unwrap();

    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("has no guest to migrate"), "{}", said(&output));
}

#[test]
fn arrival_that_nothing_confirms_has_a_status_of_its_own() {
    for (knows_destination, status) in [(false, 7), (true, 0)] {
        let pair = Pair::new();
        let off = json!({"capabilities": [{"capability": "return-path", "state": false}]});
        pair.a.vm().execute("migrate-set-capabilities", off).unwrap();
        pair.b.vm().execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
        let query = pair.b.vm().execute("query-migrate", Value::Null).unwrap();
        let port = query["socket-address"][0]["port"].as_str().unwrap().to_owned();
        let to = format!("tcp:127.0.0.1:{port}");

        let output = match knows_destination {
            true => pair.migrate(&to, &["--json"]),
            false => {
                Command::new(STERNA).args(["migrate", &pair.a.socket(), &to, "--json"]).output().unwrap()
            }
        };

        assert_eq!(output.status.code(), Some(status), "{}", said(&output));
        let record: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(record["unconfirmed"].is_string(), status == 7, "{record}");
        if status == 7 {
            let said = said(&output);
            assert!(said.contains("return-path is off") && said.contains("`cont` at"), "{said}");
        }
    }
}

#[test]
fn progress_without_a_terminal_is_plain_lines() {
    let directory = tempfile::tempdir().unwrap();
    let a = Process::start(directory.path().join("a"), &["--fill=random", SLOWLY]);
    let b = Process::start(directory.path().join("b"), &["--incoming=defer"]);
    let line =
        ["migrate", &a.socket(), "tcp:127.0.0.1:0", "--dest-qmp", &b.socket(), "--set", "max-bandwidth=9M"];

    let output = Command::new(STERNA).args(line).output().unwrap();

    let said = said(&output);
    assert!(output.status.success(), "{said}");
    let lines: Vec<_> = said.lines().filter(|line| line.contains(" s  active ")).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains("remaining")), "{said}");
    assert!(!said.contains('\u{1b}') && !said.contains('\r'), "{said:?}");
}
