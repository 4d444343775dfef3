//! The demo as users run it: completed, cancelled, killed.

use crate::certificates;

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(["demo", "--machine=process", "--ram=64M", "--json"]).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn record(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// VM processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let of = |pid: u32| -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        line.trim().parse().ok().filter(|found: &u32| *found == parent).map(|_| pid)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(of).collect()
}

/// Repeats `found` until it is true. Fails after a minute, which is more than any host needs.
fn eventually(what: &str, mut found: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !found() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn gone(pids: &[u32]) {
    eventually("the VMs end", || {
        pids.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    });
}

#[test]
fn demo_in_postcopy_arrives_whole_over_tls_too() {
    let certificates = certificates::good_directory();
    let tls = format!("--tls-dir={}", certificates.path().display());
    for more in [&["--channels=0"][..], &["--channels=2"], &["--channels=0", &tls]] {
        let common = [
            "--vcpus=4",
            "--rate=20000",
            "--warm-up=0.2",
            "--postcopy=0",
            "--set=max-bandwidth=40M",
            "--cap=postcopy-blocktime",
        ];
        let output = demo(&[&common[..], more].concat()).output().unwrap();

        let record = record(&output);
        assert!(output.status.success(), "{more:?}: {record}");
        assert!(record["statistics"]["postcopy_bytes"].as_u64().unwrap() > 0, "{more:?}: {record}");
        let (report, there) = (&record["statistics"]["postcopy"], &record["arrival"]);
        assert!(report["all_sent"].as_f64() > report["at"].as_f64(), "{report}");
        let sum = |series: &serde_json::Value| -> u64 {
            series["counts"].as_array().unwrap().iter().filter_map(serde_json::Value::as_u64).sum()
        };
        assert_eq!(sum(&report["faults"]), sum(&there["faults"]), "{record}");
        assert!(
            there["complete"].as_f64() >= there["started"].as_f64() && there["times"].is_object(),
            "{there}"
        );
    }
}

/// With KVM, the kernel causes page faults on behalf of vCPUs.
#[test]
fn demo_of_vcpus_in_postcopy_arrives_whole() {
    if !std::path::Path::new("/dev/kvm").exists() {
        return;
    }
    let arguments =
        ["demo", "--machine=kvm", "--ram=64M", "--vcpus=4", "--warm-up=0.2", "--json", "--channels=0"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let output = command.args(arguments).args(["--postcopy=0", "--set=max-bandwidth=30M"]).output().unwrap();

    let record = record(&output);
    assert!(output.status.success(), "{record}");
    assert!(record["statistics"]["postcopy_bytes"].as_u64().unwrap() > 0, "{record}");
}

#[test]
fn demo_of_each_kind_of_channel_arrives_whole() {
    for channels in ["0", "1", "3"] {
        let channels = format!("--channels={channels}");
        let output = demo(&["--rate=2000", "--warm-up=0.2", &channels]).output().unwrap();

        let record = record(&output);
        assert!(output.status.success(), "{channels}: {record}");
        assert_eq!(record["check"]["passed"], true, "{channels}: {record}");
        assert_eq!(record["statistics"]["status"], "completed");
        assert!(record["statistics"]["downtime"].as_f64().unwrap() > 0.0);
        assert!(record["guest"]["downtime_seconds"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn demo_goes_to_an_address_of_another_kind() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("--address=unix:{}", directory.path().join("migration").display());

    let output = demo(&["--rate=2000", "--warm-up=0", &socket]).output().unwrap();

    let record = record(&output);
    assert!(output.status.success() && record["check"]["passed"] == true, "{record}");
    assert!(record["destination"].as_str().unwrap().starts_with("unix:"), "{record}");
}

#[test]
fn demo_interrupted_cancels_the_migration_and_leaves_no_process() {
    let slow = ["--set=max-bandwidth=1M", "--warm-up=0"];
    let child = demo(&slow).spawn().unwrap();
    eventually("both VMs run", || children(child.id()).len() == 2);
    let vms = children(child.id());
    // Ctrl-C works at any moment. The migration runs long enough: 64 MiB at 1 MiB/s take a minute.
    std::thread::sleep(Duration::from_millis(300));

    signal(&child, Signal::INT);

    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    gone(&vms);
}

#[test]
fn demo_killed_takes_its_vms_with_it() {
    let mut child = demo(&["--set=max-bandwidth=1M"]).spawn().unwrap();
    // The name shows that the child has executed its program. Before that, it cannot be tied to its parent's
    // end.
    let named = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with("sterna"))
    };
    eventually("both VMs run", || children(child.id()).iter().filter(|pid| named(pid)).count() == 2);
    let vms = children(child.id());

    signal(&child, Signal::KILL);

    child.wait().unwrap();
    gone(&vms);
}

#[test]
fn demo_with_a_setting_that_nobody_knows_is_a_usage_error() {
    let output = demo(&["--set=no-such-parameter=1"]).output().unwrap();

    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no-such-parameter"));
}

#[test]
fn demo_over_tls_arrives_whole_and_needs_the_files() {
    let directory = certificates::good_directory();
    let empty = tempfile::tempdir().unwrap();
    let of = |path: &std::path::Path| format!("--tls-dir={}", path.display());

    let output = demo(&["--rate=2000", "--warm-up=0.2", &of(directory.path())]).output().unwrap();
    let refused = demo(&["--warm-up=0", &of(empty.path())]).output().unwrap();

    let record = record(&output);
    assert!(output.status.success(), "{record}");
    assert_eq!(record["check"]["passed"], true, "{record}");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("ca-cert.pem"), "{said}");
}
