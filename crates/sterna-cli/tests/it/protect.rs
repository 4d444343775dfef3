//! `sterna protect` with two of Sterna's own VMs, as users run them. With QEMU: interop's `qemu_protect`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::Endpoint;
use sterna_qmp::drive::Vm;

const PATIENCE: Duration = Duration::from_secs(60);

/// A primary, its standby, and the command that tells both; an arbiter in a directory.
struct Pair {
    directory: tempfile::TempDir,
    primary: Child,
    standby: Child,
    protects: Child,
}

impl Pair {
    fn new(more: &[&str]) -> Self {
        Self::with(&["--lease=2s"], more)
    }

    fn with(vm: &[&str], more: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        std::fs::create_dir(at.join("arbiter")).unwrap();
        let primary = run(at, "a.qmp", vm);
        let standby = run(at, "b.qmp", &[vm, &["--incoming=defer"]].concat());
        wait("the monitors", || connect(&at.join("a.qmp")).is_some() && connect(&at.join("b.qmp")).is_some());
        let protects = sterna()
            .arg("protect")
            .arg(at.join("a.qmp"))
            .arg(format!("unix:{}", at.join("standby").display()))
            .arg("--standby-qmp")
            .arg(at.join("b.qmp"))
            .args(["--json", "--checkpoint-delay=20"])
            .args(more)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pair = Self { directory, primary, standby, protects };
        wait("ten checkpoints", || pair.report("b.qmp")["checkpoints"].as_u64() >= Some(10));
        pair
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn ask(&self, name: &str, command: &str) -> Value {
        connect(&self.path(name)).unwrap().execute(command, Value::Null).unwrap()
    }

    fn report(&self, name: &str) -> Value {
        self.ask(name, "x-sterna-query-protection")
    }

    fn is_running(&self, name: &str) -> bool {
        self.ask(name, "query-status")["running"] == true
    }

    /// The guest's memory is one consistent cut, here.
    fn assert_consistent(&self, name: &str) {
        let mut vm = connect(&self.path(name)).unwrap();
        let verdict = vm.execute("x-sterna-check-guest", Value::Null).unwrap();
        assert_eq!(verdict["consistent"], true, "{verdict}");
    }

    /// How `sterna protect` ends.
    fn protect_ends(&mut self) -> (Option<i32>, String) {
        let status = self.protects.wait().unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(self.protects.stderr.as_mut().unwrap(), &mut said).unwrap();
        (status.code(), said)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in [&mut self.protects, &mut self.primary, &mut self.standby] {
            // Both fail if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn sterna() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
}

fn run(at: &Path, socket: &str, more: &[&str]) -> Child {
    run_with(at, socket, &format!("file:{}", at.join("arbiter").display()), more)
}

fn run_with(at: &Path, socket: &str, arbiter: &str, more: &[&str]) -> Child {
    sterna()
        .args(["run", "--machine=process", "--ram=32M", "--rate=2000", "--vcpus=2"])
        .arg(format!("--qmp=unix:{}", at.join(socket).display()))
        .arg(format!("--arbiter={arbiter}"))
        .arg(format!("--exit-with-parent={}", std::process::id()))
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn connect(socket: &Path) -> Option<Vm> {
    Vm::connect(&Endpoint::Unix(socket.to_owned())).ok()
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn command(name: &str, socket: &Path, more: &[&str]) -> Output {
    sterna().arg(name).arg(socket).args(more).output().unwrap()
}

#[test]
fn guest_of_a_killed_primary_goes_on_at_its_standby() {
    for channels in [&[][..], &["--channels=2"], &["--channels=2", "--delta", "--in-flight=3"]] {
        let mut pair = Pair::new(channels);
        assert_eq!(pair.ask("a.qmp", "query-migrate")["status"], "colo");
        assert_eq!(pair.ask("a.qmp", "query-colo-status")["mode"], "primary");
        let capabilities = pair.ask("a.qmp", "query-migrate-capabilities");
        let is_on = |name: &str| {
            let entries = capabilities.as_array().unwrap();
            entries.iter().any(|entry| entry["capability"] == name && entry["state"] == true)
        };
        assert_eq!(is_on("xbzrle"), channels.contains(&"--delta"), "{channels:?}");
        assert_eq!(pair.ask("b.qmp", "query-colo-status")["mode"], "secondary");
        assert!(!pair.is_running("b.qmp"));

        pair.primary.kill().unwrap();

        wait("the survivor", || pair.is_running("b.qmp"));
        wait("the end at the standby", || pair.ask("b.qmp", "query-migrate")["status"] == "completed");
        assert_eq!(std::fs::read_dir(pair.path("arbiter")).unwrap().count(), 1, "one claim");
        let (status, said) = pair.protect_ends();
        assert_eq!(status, Some(3), "{said}");
        pair.assert_consistent("b.qmp");
    }
}

#[test]
fn how_checkpoints_are_taken_is_set_by_the_command_and_changes_live() {
    let options = [
        "--checkpoint-mode=load",
        "--checkpoint-overhead=50",
        "--output-delay=7",
        "--in-flight=2",
        "--checkpoint-copy=copy-on-write",
    ];
    let pair = Pair::new(&options);
    let shown = pair.ask("a.qmp", "query-migrate-parameters");
    assert_eq!(shown["x-sterna-checkpoint-mode"], "load");
    assert_eq!(
        (&shown["x-sterna-checkpoint-overhead"], &shown["x-sterna-output-delay"]),
        (&json!(50), &json!(7))
    );
    assert_eq!(shown["x-sterna-checkpoints-in-flight"], 2);
    assert_eq!(shown["x-sterna-checkpoint-copy"], "copy-on-write");
    let set = |parameters: Value| {
        let mut vm = connect(&pair.path("a.qmp")).unwrap();
        vm.execute("migrate-set-parameters", parameters)
    };

    set(json!({"x-sterna-checkpoint-mode": "interval", "x-checkpoint-delay": 600_000})).unwrap();
    assert_eq!(pair.report("a.qmp")["checkpoint-interval"], json!(600.0));
    set(json!({"x-sterna-checkpoints-in-flight": 4, "x-checkpoint-delay": 20})).unwrap();
    let before = pair.report("b.qmp")["checkpoints"].as_u64();
    wait("more checkpoints", || pair.report("b.qmp")["checkpoints"].as_u64() > before);
    for wrong in [json!({"x-sterna-checkpoints-in-flight": 5}), json!({"x-sterna-checkpoint-overhead": 91})] {
        assert!(set(wrong).is_err());
    }
}

#[test]
fn what_only_a_sterna_vm_has_is_refused_for_a_qemu() {
    for option in [
        "--delta=1M",
        "--in-flight=2",
        "--checkpoint-mode=output",
        "--output-delay=5",
        "--checkpoint-overhead=5",
        "--checkpoint-copy=copy",
    ] {
        // Nobody answers there: what is wrong with the line is said first.
        let refused = command("protect", Path::new("/nowhere/qmp"), &["unix:/nowhere/standby", option]);
        let said = String::from_utf8(refused.stderr).unwrap();
        let (name, _) = option.split_once('=').unwrap();
        assert!(said.contains(name) && said.contains("Sterna VM"), "{said}");
    }
}

#[test]
fn primary_of_a_killed_standby_goes_on_alone() {
    let mut pair = Pair::new(&[]);

    pair.standby.kill().unwrap();

    let (status, said) = pair.protect_ends();
    assert_eq!(status, Some(0), "{said}");
    assert!(pair.is_running("a.qmp"));
    assert_eq!(pair.ask("a.qmp", "query-colo-status")["last-mode"], "primary");
    pair.assert_consistent("a.qmp");
}

#[test]
fn guest_is_handed_over_as_planned_and_protection_ends_by_word() {
    let mut pair = Pair::new(&["--channels=2"]);
    let taken = command("takeover", &pair.path("b.qmp"), &["--planned"]);
    assert!(taken.status.success(), "{taken:?}");
    wait("the guest", || pair.is_running("b.qmp"));
    let (status, said) = pair.protect_ends();
    assert_eq!(status, Some(0), "{said}");
    pair.assert_consistent("b.qmp");
    let over = json!({"status": "postmigrate", "running": false});
    wait("the end at the primary", || pair.ask("a.qmp", "query-status") == over);

    let mut pair = Pair::new(&[]);
    let ended = command("unprotect", &pair.path("a.qmp"), &[]);
    assert!(ended.status.success(), "{ended:?}");
    assert!(pair.is_running("a.qmp"));
    // The standby says that it is over before it is.
    wait("the end at the standby", || pair.ask("b.qmp", "query-migrate")["status"] == "failed");
    assert_eq!(pair.protect_ends().0, Some(0));
}

#[test]
fn planned_takeover_without_an_arbiter_fails_and_the_guest_goes_on_protected() {
    let mut pair = Pair::with(&["--lease=60s"], &[]);
    std::fs::rename(pair.path("arbiter"), pair.path("away")).unwrap();
    let checkpoints = |pair: &Pair| pair.report("b.qmp")["checkpoints"].as_u64().unwrap();
    let before = checkpoints(&pair);

    let refused = command("takeover", &pair.path("b.qmp"), &["--planned"]);

    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("the arbiter cannot be asked now") && said.contains("protected"), "{said}");
    assert!(pair.is_running("a.qmp") && !pair.is_running("b.qmp"));
    wait("checkpoints", || checkpoints(&pair) > before + 5);

    std::fs::rename(pair.path("away"), pair.path("arbiter")).unwrap();
    assert!(command("takeover", &pair.path("b.qmp"), &["--planned"]).status.success());
    wait("the guest at the standby", || pair.is_running("b.qmp"));
    assert_eq!(pair.protect_ends().0, Some(0));
    pair.assert_consistent("b.qmp");
}

#[test]
fn arbiter_that_is_out_of_reach_is_named_at_both_sides_and_the_guest_waits() {
    let pair = Pair::new(&[]);
    std::fs::rename(pair.path("arbiter"), pair.path("away")).unwrap();

    assert!(command("takeover", &pair.path("b.qmp"), &[]).status.success());

    for (name, state) in [("a.qmp", "asking"), ("b.qmp", "claiming")] {
        let arbiter = pair.path("arbiter").display().to_string();
        wait(&format!("{state} with the arbiter's name at {name}"), || {
            let info = command("info", &pair.path(name), &[]);
            let info = String::from_utf8_lossy(&info.stdout).into_owned();
            info.contains(state) && info.contains(&arbiter) && info.contains("gives no ruling")
        });
    }
    wait("the stop", || !pair.is_running("a.qmp"));
    assert!(!pair.is_running("b.qmp"));

    std::fs::rename(pair.path("away"), pair.path("arbiter")).unwrap();
    wait("one survivor", || {
        let runs =
            ["a.qmp", "b.qmp"].map(|name| connect(&pair.path(name)).is_some() && pair.is_running(name));
        assert_ne!(runs, [true, true]);
        runs != [false, false]
    });
}

#[test]
fn what_cannot_carry_checkpoints_is_refused_in_one_sentence_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let _vm = Vms(vec![run(directory.path(), "a.qmp", &[])]);
    let socket = directory.path().join("a.qmp");
    wait("the monitor", || connect(&socket).is_some());
    let mut vm = connect(&socket).unwrap();
    let on = |names: &[&str]| {
        let on: Vec<_> = names.iter().map(|name| json!({"capability": name, "state": true})).collect();
        json!({ "capabilities": on })
    };

    // When it is set: each alone may be on.
    for other in ["mapped-ram", "pause-before-switchover", "background-snapshot", "postcopy-ram"] {
        let refused = vm.execute("migrate-set-capabilities", on(&[other, "x-colo"])).unwrap_err().to_string();
        assert!(refused.contains(other), "{refused}");
    }
    let without = json!({"capabilities": [{"capability": "return-path", "state": false}, {"capability": "x-colo", "state": true}]});
    let refused = vm.execute("migrate-set-capabilities", without).unwrap_err().to_string();
    assert!(refused.contains("x-colo") && refused.contains("return-path"), "{refused}");

    // When it is started.
    vm.execute("migrate-set-capabilities", on(&["x-colo"])).unwrap();
    let file = format!("file:{}", directory.path().join("image").display());
    for (uri, says) in [
        (file.as_str(), "a standby listens at tcp: or unix:"),
        ("rdma:127.0.0.1:9", "a standby listens at tcp: or unix:"),
        ("tcp:127.0.0.1:1", "127.0.0.1:1"),
    ] {
        let refused = vm.execute("migrate", json!({ "uri": uri })).unwrap_err().to_string();
        assert!(refused.contains(says), "{uri}: {refused}");
        assert_eq!(vm.run_state().unwrap(), "running");
    }
    assert!(!directory.path().join("image").exists());
    vm.execute("migrate-set-parameters", json!({"x-checkpoint-delay": 0}))
        .expect_err("it would not let the guest run");
}

#[test]
fn frozen_primary_says_nothing_when_it_wakes_and_ends() {
    let mut pair = Pair::new(&[]);
    let id = rustix::process::Pid::from_child(&pair.primary);
    rustix::process::kill_process(id, rustix::process::Signal::STOP).unwrap();

    wait("the survivor", || pair.is_running("b.qmp"));
    rustix::process::kill_process(id, rustix::process::Signal::CONT).unwrap();

    // The claim is lost: its guest never runs again, and its VM ends.
    let ended = {
        let begin = Instant::now();
        loop {
            match pair.primary.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begin.elapsed() < PATIENCE, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    assert_eq!(ended.code(), Some(6));
    assert!(pair.is_running("b.qmp"));
    pair.assert_consistent("b.qmp");
}

#[test]
fn sides_with_two_arbiters_are_refused_by_name_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let spec = |name: &str| {
        std::fs::create_dir_all(at.join(name)).unwrap();
        format!("file:{}", at.join(name).display())
    };
    for (here, there, why) in [
        (spec("one"), spec("other"), "do not share it"),
        (spec("one"), "ask".to_owned(), "of two kinds"),
        (spec("one"), format!("file:{}", at.join("nowhere").display()), "cannot ask its arbiter"),
    ] {
        let mut vms = Vms(Vec::new());
        vms.0.push(run_with(at, "a.qmp", &here, &[]));
        vms.0.push(run_with(at, "b.qmp", &there, &["--incoming=defer"]));
        wait("the monitors", || connect(&at.join("a.qmp")).is_some() && connect(&at.join("b.qmp")).is_some());

        let ended = sterna()
            .arg("protect")
            .arg(at.join("a.qmp"))
            .arg(format!("unix:{}", at.join("standby").display()))
            .arg("--standby-qmp")
            .arg(at.join("b.qmp"))
            .output()
            .unwrap();

        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains(why) && said.contains(&there["file:".len().min(there.len())..]), "{said}");
        let mut primary = connect(&at.join("a.qmp")).unwrap();
        assert_eq!(primary.execute("query-status", Value::Null).unwrap()["running"], true);
        let report = primary.execute("x-sterna-query-protection", Value::Null);
        assert!(report.is_err() || report.unwrap()["checkpoints"].as_u64().unwrap_or(0) == 0);
        for name in ["one", "other"] {
            assert_eq!(
                std::fs::read_dir(at.join(name))
                    .unwrap()
                    .filter(|entry| {
                        !entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".token")
                    })
                    .count(),
                0,
                "nothing is claimed"
            );
        }
        drop(vms);
        let _ = std::fs::remove_file(at.join("standby"));
    }
}

/// They end with it.
struct Vms(Vec<Child>);

impl Drop for Vms {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn guest_without_a_standby_is_refused_protection_and_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut vm = run(directory.path(), "a.qmp", &[]);
    let socket = directory.path().join("a.qmp");
    wait("the monitor", || connect(&socket).is_some());
    // Nobody listens there.
    let nobody = format!("unix:{}", directory.path().join("nobody").display());
    let refused = sterna().arg("protect").arg(&socket).arg(&nobody).output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let wrong = sterna().arg("protect").arg(&socket).arg(&nobody).arg("--qmp=unix:x").output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    let absent = directory.path().join("absent.qmp");
    let absent =
        sterna().arg("protect").arg(absent).arg(&nobody).arg("--standby-qmp=b.qmp").output().unwrap();
    assert_eq!(absent.status.code(), Some(1), "{absent:?}");
    assert!(String::from_utf8_lossy(&absent.stderr).contains("absent.qmp"), "{absent:?}");
    let mut monitor = connect(&socket).unwrap();
    assert_eq!(monitor.run_state().unwrap(), "running");
    let _ = vm.kill();
    let _ = vm.wait();
}
