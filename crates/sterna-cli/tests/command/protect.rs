//! `sterna protect` with two Sterna VMs, as users run them. Tests with QEMU are interop's `qemu_protect`.

mod again;
mod record;

use std::ops::Deref;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::protection::{Process, Site, command, connect, sterna, wait};

/// A primary, its standby, and `sterna protect`; the arbiter is a directory.
struct Pair {
    site: Site,
    primary: Process,
    standby: Process,
    protects: Process,
}

impl Deref for Pair {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

impl Pair {
    fn new(more: &[&str]) -> Self {
        Self::with(&["--lease=2s"], more)
    }

    fn with(options: &[&str], more: &[&str]) -> Self {
        let site = Site::new();
        let primary = site.start("a", vm(&site, "a").args(options));
        let standby = site.start("b", vm(&site, "b").args(options).arg("--incoming=defer"));
        let protects = Process(site.protect("a", "b", more).spawn().unwrap());
        site.await_checkpoints("b", 10);
        Self { site, primary, standby, protects }
    }

    /// Waits for `sterna protect` to exit. Returns its status and its messages.
    fn protect_ends(&mut self) -> (Option<i32>, String) {
        (self.protects.wait(), self.protect_said())
    }
}

/// Asserts that the guest's memory at `side` is one consistent cut.
fn assert_consistent(site: &Site, side: &str) {
    let verdict = site.ask(side, "x-sterna-check-guest");
    assert_eq!(verdict["consistent"], true, "{verdict}");
}

fn vm(site: &Site, side: &str) -> Command {
    vm_with(site, side, &site.arbiter())
}

fn vm_with(site: &Site, side: &str, arbiter: &str) -> Command {
    let mut vm = site.vm(side, arbiter);
    vm.args(["--machine=process", "--ram=32M", "--rate=2000", "--vcpus=2"]);
    vm
}

#[test]
fn guest_of_a_killed_primary_goes_on_at_its_standby() {
    for channels in [&[][..], &["--channels=2"], &["--channels=2", "--delta", "--in-flight=3"]] {
        let mut pair = Pair::new(channels);
        assert_eq!(pair.ask("a", "query-migrate")["status"], "colo");
        assert_eq!(pair.ask("a", "query-colo-status")["mode"], "primary");
        let capabilities = pair.ask("a", "query-migrate-capabilities");
        let is_on = |name: &str| {
            let entries = capabilities.as_array().unwrap();
            entries.iter().any(|entry| entry["capability"] == name && entry["state"] == true)
        };
        assert_eq!(is_on("xbzrle"), channels.contains(&"--delta"), "{channels:?}");
        assert_eq!(pair.ask("b", "query-colo-status")["mode"], "secondary");
        assert!(!pair.is_running("b"));

        pair.primary.kill();

        wait("the survivor", || pair.is_running("b"));
        wait("the end at the standby", || pair.ask("b", "query-migrate")["status"] == "completed");
        assert_eq!(std::fs::read_dir(pair.path("arbiter")).unwrap().count(), 1, "one claim");
        let (status, said) = pair.protect_ends();
        assert_eq!(status, Some(3), "{said}");
        assert_consistent(&pair, "b");
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
    let shown = pair.ask("a", "query-migrate-parameters");
    assert_eq!(shown["x-sterna-checkpoint-mode"], "load");
    assert_eq!(
        (&shown["x-sterna-checkpoint-overhead"], &shown["x-sterna-output-delay"]),
        (&json!(50), &json!(7))
    );
    assert_eq!(shown["x-sterna-checkpoints-in-flight"], 2);
    assert_eq!(shown["x-sterna-checkpoint-copy"], "copy-on-write");
    let set = |parameters: Value| {
        let mut vm = connect(&pair.socket("a")).unwrap();
        vm.execute("migrate-set-parameters", parameters)
    };

    set(json!({"x-sterna-checkpoint-mode": "interval", "x-checkpoint-delay": 600_000})).unwrap();
    assert_eq!(pair.report("a")["checkpoint-interval"], json!(600.0));
    set(json!({"x-sterna-checkpoints-in-flight": 4, "x-checkpoint-delay": 20})).unwrap();
    pair.await_checkpoints("b", 1);
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
        // No monitor answers there: the error about the arguments takes precedence.
        let refused = command("protect", Path::new("/nowhere/qmp"), &["unix:/nowhere/standby", option]);
        let said = String::from_utf8(refused.stderr).unwrap();
        let (name, _) = option.split_once('=').unwrap();
        assert!(said.contains(name) && said.contains("Sterna VM"), "{said}");
    }
}

#[test]
fn metrics_of_a_protection_are_those_of_its_last_look() {
    let pair = Pair::new(&["--metrics=127.0.0.1:0"]);
    let said = pair.protect_said();
    let port = said.split_once("metrics at tcp:127.0.0.1:").expect(&said).1.lines().next().unwrap();

    let page = crate::exposition::fetch(port.parse().unwrap());

    let state = [("state", "protected"), ("role", "primary")];
    assert_eq!(page.value("sterna_protection_state", &state), Some(1.0), "{:?}", page.names());
    assert!(page.value("sterna_protection_checkpoints_total", &[]) >= Some(1.0));
    assert!(page.value("sterna_migration_data_processed_bytes", &[]) > Some(0.0));
}

#[test]
fn primary_of_a_killed_standby_goes_on_alone() {
    let mut pair = Pair::new(&[]);

    pair.standby.kill();

    let (status, said) = pair.protect_ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("the standby was lost") && said.contains("the claim is won"), "{said}");
    assert!(!said.contains("cancelled"), "that is what follows, and not why: {said}");
    assert!(pair.is_running("a"));
    assert_eq!(pair.ask("a", "query-colo-status")["last-mode"], "primary");
    assert_consistent(&pair, "a");
}

#[test]
fn guest_is_handed_over_as_planned_and_protection_ends_by_word() {
    let mut pair = Pair::new(&["--channels=2"]);
    let taken = command("takeover", &pair.socket("b"), &["--planned"]);
    assert!(taken.status.success(), "{taken:?}");
    wait("the guest", || pair.is_running("b"));
    let (status, said) = pair.protect_ends();
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("handed over: the guest runs at the standby"), "{said}");
    assert_consistent(&pair, "b");
    let over = json!({"status": "postmigrate", "running": false});
    wait("the end at the primary", || pair.ask("a", "query-status") == over);

    let mut pair = Pair::new(&[]);
    let ended = command("unprotect", &pair.socket("a"), &[]);
    assert!(ended.status.success(), "{ended:?}");
    assert!(pair.is_running("a"));
    // The standby acknowledges the end before its own status shows it.
    wait("the end at the standby", || pair.ask("b", "query-migrate")["status"] == "failed");
    assert_eq!(pair.protect_ends().0, Some(0));
}

#[test]
fn planned_takeover_without_an_arbiter_fails_and_the_guest_goes_on_protected() {
    let mut pair = Pair::with(&["--lease=60s"], &[]);
    std::fs::rename(pair.path("arbiter"), pair.path("away")).unwrap();
    let before = pair.checkpoints("b");

    let refused = command("takeover", &pair.socket("b"), &["--planned"]);

    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("the arbiter cannot be reached") && said.contains("protected"), "{said}");
    // The refusal reaches the primary's operator before its guest runs again.
    wait("the guest at the primary", || pair.is_running("a"));
    assert!(!pair.is_running("b"));
    wait("checkpoints", || pair.checkpoints("b") > before + 5);

    std::fs::rename(pair.path("away"), pair.path("arbiter")).unwrap();
    assert!(command("takeover", &pair.socket("b"), &["--planned"]).status.success());
    wait("the guest at the standby", || pair.is_running("b"));
    assert_eq!(pair.protect_ends().0, Some(0));
    assert_consistent(&pair, "b");
}

#[test]
fn arbiter_that_is_out_of_reach_is_named_at_both_sides_and_the_guest_waits() {
    let pair = Pair::new(&[]);
    std::fs::rename(pair.path("arbiter"), pair.path("away")).unwrap();

    // The outcome is unknown until the arbiter is available again.
    let unknown = command("takeover", &pair.socket("b"), &["--wait", "2"]);
    assert_eq!(unknown.status.code(), Some(3), "{}", String::from_utf8_lossy(&unknown.stderr));

    for (name, state) in [("a", "asking"), ("b", "claiming")] {
        let arbiter = pair.path("arbiter").display().to_string();
        wait(&format!("{state} with the arbiter's name at {name}"), || {
            let info = command("info", &pair.socket(name), &[]);
            let info = String::from_utf8_lossy(&info.stdout).into_owned();
            info.contains(state) && info.contains(&arbiter) && info.contains("gives no ruling")
        });
    }
    wait("the stop", || !pair.is_running("a"));
    assert!(!pair.is_running("b"));

    std::fs::rename(pair.path("away"), pair.path("arbiter")).unwrap();
    wait("one survivor", || {
        let runs = ["a", "b"].map(|name| connect(&pair.socket(name)).is_some() && pair.is_running(name));
        assert_ne!(runs, [true, true]);
        runs != [false, false]
    });
}

/// If an operator is the arbiter, `sterna takeover` is the claim.
/// This holds for a guest whose primary is dead, and for one that its primary gives.
#[test]
fn word_of_an_operator_who_is_the_arbiter_is_the_claim() {
    let site = Site::new();
    let start = |side: &str, more: &[&str]| {
        site.start(side, vm_with(&site, side, "ask").arg("--lease=2s").args(more))
    };
    let protect = |from, to| Process(site.protect(from, to, &[]).spawn().unwrap());
    let mut primary = start("a", &[]);
    let _standby = start("b", &["--incoming=defer"]);
    let _protects = protect("a", "b");
    site.await_checkpoints("b", 3);

    primary.kill();
    wait("the question", || site.report("b")["state"] == "claiming");
    assert!(!site.is_running("b"), "nobody has decided");
    assert!(command("takeover", &site.socket("b"), &[]).status.success());
    wait("the guest", || site.is_running("b"));
    assert_consistent(&site, "b");

    let _another = start("a", &["--incoming=defer"]);
    let mut protects = protect("b", "a");
    site.await_checkpoints("a", 3);
    assert!(command("takeover", &site.socket("a"), &["--planned"]).status.success());
    wait("the guest", || site.is_running("a"));
    assert_eq!(protects.wait(), Some(0), "{}", site.protect_said());
    assert!(!site.is_running("b"));
    assert_consistent(&site, "a");
}

#[test]
fn what_cannot_carry_checkpoints_is_refused_in_one_sentence_and_the_guest_runs_on() {
    let site = Site::new();
    let _vm = site.start("a", &mut vm(&site, "a"));
    let mut vm = connect(&site.socket("a")).unwrap();
    let on = |names: &[&str]| {
        let on: Vec<_> = names.iter().map(|name| json!({"capability": name, "state": true})).collect();
        json!({ "capabilities": on })
    };

    // Each capability alone is allowed. The combination is refused when it is set.
    for other in ["mapped-ram", "pause-before-switchover", "background-snapshot", "postcopy-ram"] {
        let refused = vm.execute("migrate-set-capabilities", on(&[other, "x-colo"])).unwrap_err().to_string();
        assert!(refused.contains(other), "{refused}");
    }
    let without = json!({"capabilities": [{"capability": "return-path", "state": false}, {"capability": "x-colo", "state": true}]});
    let refused = vm.execute("migrate-set-capabilities", without).unwrap_err().to_string();
    assert!(refused.contains("x-colo") && refused.contains("return-path"), "{refused}");

    // These are refused when the protection is started.
    vm.execute("migrate-set-capabilities", on(&["x-colo"])).unwrap();
    let file = format!("file:{}", site.path("image").display());
    for (uri, says) in [
        (file.as_str(), "a standby needs an address with a return path"),
        ("rdma:127.0.0.1:9", "a standby needs an address with a return path"),
        ("tcp:127.0.0.1:1", "127.0.0.1:1"),
    ] {
        let refused = vm.execute("migrate", json!({ "uri": uri })).unwrap_err().to_string();
        assert!(refused.contains(says), "{uri}: {refused}");
        assert_eq!(vm.run_state().unwrap(), "running");
    }
    assert!(!site.path("image").exists());
    vm.execute("migrate-set-parameters", json!({"x-checkpoint-delay": 0}))
        .expect_err("it would not let the guest run");
}

#[test]
fn frozen_primary_says_nothing_when_it_wakes_and_ends() {
    let mut pair = Pair::new(&[]);
    let id = rustix::process::Pid::from_child(&pair.primary.0);
    rustix::process::kill_process(id, rustix::process::Signal::STOP).unwrap();

    wait("the survivor", || pair.is_running("b"));
    rustix::process::kill_process(id, rustix::process::Signal::CONT).unwrap();

    // The primary loses the claim: its guest never runs again, and its VM exits.
    assert_eq!(pair.primary.wait(), Some(6));
    assert!(pair.is_running("b"));
    assert_consistent(&pair, "b");
}

#[test]
fn sides_with_two_arbiters_are_refused_by_name_and_the_guest_runs_on() {
    let site = Site::new();
    let spec = |name: &str| {
        std::fs::create_dir_all(site.path(name)).unwrap();
        format!("file:{}", site.path(name).display())
    };
    for (here, there, why) in [
        (spec("one"), spec("other"), "do not share it"),
        (spec("one"), "ask".to_owned(), "of two kinds"),
        (spec("one"), format!("file:{}", site.path("nowhere").display()), "cannot ask its arbiter"),
    ] {
        let _primary = site.start("a", &mut vm_with(&site, "a", &here));
        let _standby = site.start("b", vm_with(&site, "b", &there).arg("--incoming=defer"));

        let ended = site.protect("a", "b", &[]).status().unwrap();

        let said = site.protect_said();
        assert_eq!(ended.code(), Some(1), "{said}");
        assert!(said.contains(why) && said.contains(&there["file:".len().min(there.len())..]), "{said}");
        let mut primary = connect(&site.socket("a")).unwrap();
        assert_eq!(primary.execute("query-status", Value::Null).unwrap()["running"], true);
        let report = primary.execute("x-sterna-query-protection", Value::Null);
        assert!(report.is_err() || report.unwrap()["checkpoints"].as_u64().unwrap_or(0) == 0);
        for name in ["one", "other"] {
            assert_eq!(
                std::fs::read_dir(site.path(name))
                    .unwrap()
                    .filter(|entry| {
                        !entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".token")
                    })
                    .count(),
                0,
                "nothing is claimed"
            );
        }
        let _ = std::fs::remove_file(site.path("to-b"));
    }
}

#[test]
fn guest_without_a_standby_is_refused_protection_and_runs_on() {
    let site = Site::new();
    let _vm = site.start("a", &mut vm(&site, "a"));
    let socket = site.socket("a");
    // No process listens there.
    let nobody = format!("unix:{}", site.path("nobody").display());
    let refused = sterna().arg("protect").arg(&socket).arg(&nobody).output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let wrong = sterna().arg("protect").arg(&socket).arg(&nobody).arg("--qmp=unix:x").output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    let absent = site.path("absent.qmp");
    let absent =
        sterna().arg("protect").arg(absent).arg(&nobody).arg("--standby-qmp=b.qmp").output().unwrap();
    assert_eq!(absent.status.code(), Some(1), "{absent:?}");
    assert!(String::from_utf8_lossy(&absent.stderr).contains("absent.qmp"), "{absent:?}");
    let mut monitor = connect(&socket).unwrap();
    assert_eq!(monitor.run_state().unwrap(), "running");
}

/// The capabilities and parameters of a VM.
fn settings(site: &Site, side: &str) -> [Value; 2] {
    ["query-migrate-capabilities", "query-migrate-parameters"].map(|command| site.ask(side, command))
}

#[test]
fn what_a_protection_sets_is_put_back_at_its_end_and_after_a_refusal() {
    let site = Site::new();
    let _primary = site.start("a", vm(&site, "a").arg("--lease=2s"));
    let _standby = site.start("b", vm(&site, "b").args(["--lease=2s", "--incoming=defer"]));
    let before = [settings(&site, "a"), settings(&site, "b")];
    let options = [
        "--delta",
        "--in-flight=3",
        "--checkpoint-mode=load",
        "--channels=2",
        "--checkpoint-delay=30",
        "--checkpoint-buffer=77M",
    ];

    // Refused by the primary, because nothing listens at the standby's address.
    let refused = site.protect("a", "b", &options);
    let nowhere = site.path("nowhere");
    let standby = format!("unix:{}", site.path("to-b").display());
    let arguments: Vec<_> = refused.get_args().map(std::ffi::OsStr::to_owned).collect();
    let arguments = arguments
        .into_iter()
        .filter(|argument| argument != "--standby-qmp" && *argument != *site.socket("b"));
    let arguments = arguments.map(|argument| match argument == *standby {
        true => format!("unix:{}", nowhere.display()).into(),
        false => argument,
    });
    let failed = sterna().args(arguments).output().unwrap();
    assert!(!failed.status.success(), "{failed:?}");
    assert_eq!(settings(&site, "a"), before[0], "after a protection that did not begin");

    let mut protects = Process(site.protect("a", "b", &options).spawn().unwrap());
    site.await_checkpoints("b", 5);
    let during = settings(&site, "a");
    assert_ne!(during, before[0]);
    assert!(format!("{during:?}").contains(&(77_u64 << 20).to_string()), "{during:?}");
    assert!(command("unprotect", &site.socket("a"), &[]).status.success());
    assert_eq!(protects.wait(), Some(0), "{}", site.protect_said());

    assert_eq!(settings(&site, "a"), before[0], "{}", site.protect_said());
}
