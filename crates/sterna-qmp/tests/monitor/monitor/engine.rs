//! Tests the monitor with Sterna's own engine: RAM is really moved, and only the two sockets control it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use sterna::{Hook, RunState, SourceVm, Vm, VmError};
use sterna_qmp::{Client, MonitoredVm as _};

use super::support::{ClientExt, FakeVm, LIMIT, Monitor};

/// Waits for the MIGRATION event that reports the end of the migration.
#[track_caller]
pub fn end_of(client: &mut Client) -> Value {
    loop {
        let Some(event) = client.next_event(LIMIT).unwrap() else {
            panic!("no end: {}", client.ok("query-migrate", Value::Null));
        };
        if event.name == "MIGRATION" {
            let status = event.data["status"].clone();
            if ["completed", "failed", "cancelled"].iter().any(|end| status == *end) {
                return status;
            }
        }
    }
}

fn pair(multifd: bool) -> ((Monitor, Client), (Monitor, Client), String) {
    pair_with(multifd, true)
}

fn pair_with(multifd: bool, autostart: bool) -> ((Monitor, Client), (Monitor, Client), String) {
    let mut source = Monitor::over_the_real_engine(FakeVm::new(true, true), true).client_of();
    let mut destination = Monitor::over_the_real_engine(FakeVm::new(false, false), autostart).client_of();
    for client in [&mut source.1, &mut destination.1] {
        client.capability("events", true).unwrap();
        client.capability("multifd", multifd).unwrap();
    }
    destination.1.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    let at = destination.1.ok("query-migrate", Value::Null)["socket-address"][0].clone();
    let uri = format!("tcp:127.0.0.1:{}", at["port"].as_str().expect("a port"));
    (source, destination, uri)
}

#[test]
fn guest_moves_with_every_byte_over_qmp_alone() {
    for multifd in [false, true] {
        let ((source, mut src), (destination, mut dst), uri) = pair(multifd);
        let pattern: Vec<u8> =
            (0..1 << 18).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let ram = |vm: &FakeVm| vm.ram().block(0).read_all();
        source.vm.ram().block(0).write(4096, &pattern).unwrap();
        src.ok("migrate", json!({"uri": uri}));
        assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
        assert_eq!(end_of(&mut dst), "completed");
        assert_eq!(ram(&destination.vm)[4096..][..pattern.len()], pattern);
        assert_eq!(ram(&destination.vm), ram(&source.vm));
        assert_eq!(src.ok("query-status", Value::Null)["status"], "postmigrate");
        assert_eq!(dst.ok("query-status", Value::Null)["status"], "running");
        let info = src.ok("query-migrate", Value::Null);
        assert!(info["downtime"].is_u64() && info["ram"]["normal"].as_u64() >= Some(63), "{info}");
        src.refused("cont", Value::Null);
    }
}

#[test]
fn guest_is_saved_to_a_file_loaded_from_it_and_runs_on_here_too() {
    let directory = tempfile::tempdir().unwrap();
    for (name, mapped, multifd) in
        [("legacy", false, false), ("mapped", true, false), ("threads", true, true)]
    {
        let path = directory.path().join(name);
        let uri = format!("file:{},offset=4K", path.display());
        let channels = json!([{"channel-type": "main",
            "addr": {"transport": "file", "filename": path, "offset": 4096}}]);
        let (source, mut src) = Monitor::over_the_real_engine(FakeVm::new(true, true), true).client_of();
        let (destination, mut dst) =
            Monitor::over_the_real_engine(FakeVm::new(false, false), true).client_of();
        for client in [&mut src, &mut dst] {
            client.capability("events", true).unwrap();
            client.capability("mapped-ram", mapped).unwrap();
            client.capability("multifd", multifd).unwrap();
            client.set("direct-io", json!(true)).unwrap();
        }
        let pattern: Vec<u8> =
            (0..1 << 18).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let ram = |vm: &FakeVm| vm.ram().block(0).read_all();
        source.vm.ram().block(0).write(4096, &pattern).unwrap();

        src.ok("migrate", json!({"uri": uri}));
        assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
        assert_eq!(src.ok("query-status", Value::Null)["status"], "postmigrate");
        src.refused("migrate", json!({"uri": uri}));
        dst.ok("migrate-incoming", json!({"channels": channels}));
        assert_eq!(end_of(&mut dst), "completed", "{}", dst.ok("query-migrate", Value::Null));

        assert_eq!(ram(&destination.vm)[4096..][..pattern.len()], pattern);
        assert_eq!(ram(&destination.vm), ram(&source.vm));
        assert_eq!(dst.ok("query-status", Value::Null)["status"], "running");
        src.ok("cont", Value::Null);
        assert_eq!(src.ok("query-status", Value::Null)["status"], "running");
        src.ok("stop", Value::Null);
        assert_eq!(src.ok("query-status", Value::Null)["status"], "paused");
    }
}

#[test]
fn cpr_transfer_copies_no_page_and_is_refused_by_names_of_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let uri = format!("unix:{}", directory.path().join("m").display());
    let (source, mut src) = Monitor::over_the_real_engine(FakeVm::new(true, true), true).client_of();
    let (destination, mut dst) = Monitor::over_the_real_engine(FakeVm::new(false, false), true).client_of();
    for client in [&mut src, &mut dst] {
        client.capability("events", true).unwrap();
    }
    src.set("mode", json!("cpr-transfer")).unwrap();
    let refusal = src.refused("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    assert!(refusal.contains("cpr-transfer") && refusal.contains("unix:"), "{refusal}");
    src.capability("mapped-ram", true).unwrap();
    let refusal = src.refused("migrate", json!({"uri": uri}));
    assert!(refusal.contains("mapped-ram"), "{refusal}");
    src.capability("mapped-ram", false).unwrap();
    source.vm.ram().block(0).write(4096, &[7; 4096]).unwrap();
    let before = source.vm.ram().block(0).read_all();

    dst.ok("migrate-incoming", json!({"uri": uri}));
    src.ok("migrate", json!({"uri": uri}));

    assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
    assert_eq!(end_of(&mut dst), "completed");
    let ram = &src.ok("query-migrate", Value::Null)["ram"];
    assert_eq!((&ram["normal"], &ram["duplicate"]), (&json!(0), &json!(0)), "{ram}");
    assert_eq!(destination.vm.ram().block(0).read_all(), before);
    assert_eq!(dst.ok("query-status", Value::Null)["status"], "running");
}

#[test]
fn file_that_cannot_be_made_fails_the_migration_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, "there").unwrap();
    let uri = json!({"uri": format!("file:{}", path.display())});
    let (_source, mut src) = Monitor::over_the_real_engine(FakeVm::new(true, true), true).client_of();
    src.capability("events", true).unwrap();
    src.capability("mapped-ram", true).unwrap();
    src.ok("migrate", uri.clone());
    assert_eq!(end_of(&mut src), "failed");
    let info = src.ok("query-migrate", Value::Null);
    assert!(info["error-desc"].as_str().is_some_and(|text| text.contains("exists")), "{info}");
    assert_eq!(src.ok("query-status", Value::Null)["status"], "running");

    src.set("x-sterna-replace-file", json!(true)).unwrap();
    src.ok("migrate", uri);
    assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
}

#[test]
fn refused_guest_stays_where_it_is_and_the_next_try_works() {
    let ((source, mut src), (_destination, mut dst), uri) = pair(false);
    dst.ok("migrate_cancel", Value::Null);
    assert_eq!(dst.ok("query-migrate", Value::Null)["status"], "failed");
    src.ok("migrate", json!({"uri": uri}));
    assert_eq!(end_of(&mut src), "failed");
    assert!(src.ok("query-migrate", Value::Null)["error-desc"].is_string());
    assert_eq!(source.vm.run_state(), RunState::Running);
    dst.ok("migrate-incoming", json!({"uri": uri}));
    src.ok("migrate", json!({"uri": uri}));
    assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
    assert_eq!(end_of(&mut dst), "completed");
}

#[test]
fn operators_last_word_before_the_guest_comes_counts() {
    for (autostart, said, runs) in [
        (true, &["stop"] as &[&str], false),
        (true, &["stop", "cont"], true),
        (false, &[], false),
        (false, &["cont"], true),
        (false, &["cont", "stop"], false),
    ] {
        let ((_source, mut src), (destination, mut dst), uri) = pair_with(false, autostart);
        for command in said {
            dst.ok(command, Value::Null);
        }
        src.ok("migrate", json!({"uri": uri}));
        assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
        assert_eq!(end_of(&mut dst), "completed");
        let expected = if runs { "running" } else { "paused" };
        let status = dst.ok("query-status", Value::Null)["status"].clone();
        assert_eq!(status, expected, "autostart {autostart}, then {said:?}");
        dst.ok("cont", Value::Null);
        assert_eq!(destination.vm.run_state(), RunState::Running);
    }
}

/// A lock on a disk whose acquisition can fail.
struct Lock {
    fails: AtomicBool,
    is_held: AtomicBool,
}

impl Lock {
    fn of(vm: &FakeVm, fails: bool) -> Arc<Self> {
        let lock = Arc::new(Self { fails: AtomicBool::new(fails), is_held: AtomicBool::new(vm.has_guest()) });
        vm.hooks.lock().unwrap().push(lock.clone());
        lock
    }

    fn take(&self) -> Result<(), VmError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(VmError::new("lock", "told to fail"));
        }
        self.is_held.store(true, Ordering::SeqCst);
        Ok(())
    }
}

impl Hook for Lock {
    fn name(&self) -> String {
        "lock".into()
    }
    fn release(&self) -> Result<(), VmError> {
        self.is_held.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.take()
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.take()
    }
}

#[test]
fn held_guest_stays_held_whatever_is_tried_until_it_has_its_lock_again() {
    let ((source, mut src), (destination, mut dst), uri) = pair(false);
    let (ours, theirs) = (Lock::of(&source.vm, true), Lock::of(&destination.vm, true));
    src.set("x-sterna-prepare-limit", json!(100)).unwrap();
    src.ok("migrate", json!({"uri": uri}));
    assert_eq!(end_of(&mut src), "failed");
    assert_eq!(end_of(&mut dst), "failed");
    assert!(!ours.is_held.load(Ordering::SeqCst), "nobody holds the lock");
    // The lock fails again, so the guest is still held.
    src.ok("cont", Value::Null);
    assert_eq!(end_of(&mut src), "failed");

    let refusal = src.refused("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    assert!(refusal.contains("'cont'"), "{refusal}");
    assert!(src.refused("stop", Value::Null).contains("'cont' tries again"));
    src.refused("calc-dirty-rate", json!({"calc-time": 1}));
    assert_eq!(source.vm.run_state(), RunState::Paused, "it runs without its lock");

    ours.fails.store(false, Ordering::SeqCst);
    src.ok("cont", Value::Null);
    assert_eq!(end_of(&mut src), "failed");
    assert!(ours.is_held.load(Ordering::SeqCst));
    assert_eq!(source.vm.run_state(), RunState::Running);
    src.ok("stop", Value::Null);
    src.ok("cont", Value::Null);
    theirs.fails.store(false, Ordering::SeqCst);
    dst.ok("migrate-incoming", json!({"uri": uri}));
    src.ok("migrate", json!({"uri": uri}));
    assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
    assert!(theirs.is_held.load(Ordering::SeqCst) && !ours.is_held.load(Ordering::SeqCst));
}

pub trait ReadAll {
    fn read_all(&self) -> Vec<u8>;
}

impl ReadAll for sterna_ram::RamBlock {
    fn read_all(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.len_bytes()).unwrap()];
        self.read(0, &mut bytes).unwrap();
        bytes
    }
}
