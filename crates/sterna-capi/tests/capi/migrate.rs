//! Guests without KVM that migrate, are saved and restored.

use std::ffi::CString;

use sterna_capi::*;

use crate::certificates::good_directory;
use crate::plain::{Machine, Settings, done};

/// Migrates a guest with the same settings on both sides, and checks it.
fn migrate(settings: &Settings) -> serde_json::Value {
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", settings);
    source.boot();

    let migration = source.start(&incoming.address(), settings);

    migration.wait(-1).expect("completed");
    assert_eq!(incoming.wait(-1), Ok(true));
    target.assert_guest();
    assert!(target.runs() && !source.runs());
    assert_eq!(migration.status(), STERNA_STATUS_COMPLETED);
    // SAFETY: the handles are valid.
    unsafe {
        assert_eq!(sterna_incoming_status(incoming.0), STERNA_STATUS_COMPLETED);
        assert!(!sterna_vm_may_run(source.vm) && sterna_vm_may_run(target.vm));
    }
    assert!(incoming.statistics().is_object());
    migration.statistics()
}

#[test]
fn precopy_moves_memory_and_device() {
    let statistics = migrate(&Settings::new());

    assert_eq!(statistics["status"], "completed");
    assert_eq!(statistics["ram_total_bytes"], crate::plain::BYTES);
}

#[test]
fn multifd_with_compression_moves_the_guest_over_its_channels() {
    let settings =
        Settings::new().on("multifd").set("multifd-channels", "3").set("multifd-compression", "zstd");

    let statistics = migrate(&settings);

    assert_eq!(statistics["channels"], 3);
    assert!(statistics["multifd_bytes"].as_u64() > Some(0), "{statistics}");
}

#[test]
fn tls_with_the_files_of_a_directory_moves_the_guest() {
    let directory = good_directory();
    let path = CString::new(directory.path().to_str().expect("UTF-8")).expect("no NUL");
    let settings = Settings::new().on("multifd");
    // SAFETY: the handle and the texts are valid.
    unsafe {
        done(|e| sterna_parameters_set_tls_directory(settings.0, path.as_ptr(), e));
        done(|e| sterna_parameters_set_tls_client(settings.0, c"C=GB,O=Example,CN=client".as_ptr(), e));
    }

    migrate(&settings);
}

#[test]
fn postcopy_resumes_a_guest_that_does_not_converge_at_the_destination() {
    let settings = Settings::new().on("postcopy-ram").set("x-sterna-postcopy-after-rounds", "2");
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    source.boot();
    source.plain.writes_all.store(true, std::sync::atomic::Ordering::SeqCst);
    // No downtime is short enough for a precopy.
    let settings = settings.set("downtime-limit", "0").set("avail-switchover-bandwidth", "1");

    let migration = source.start(&incoming.address(), &settings);

    migration.wait(-1).expect("completed");
    assert_eq!(incoming.wait(-1), Ok(true));
    target.assert_guest();
    let statistics = migration.statistics();
    assert!(statistics["postcopy_bytes"].as_u64() > Some(0), "{statistics}");
}

#[test]
fn guest_is_saved_to_a_file_resumed_and_restored_elsewhere() {
    for capability in [Some("mapped-ram"), None] {
        let home = tempfile::tempdir().expect("a directory");
        let address = format!("file:{}", home.path().join("vm.img").display());
        let settings = capability.into_iter().fold(Settings::new(), Settings::on);
        let (source, target) = (Machine::new(), Machine::new());
        source.boot();

        let saved = source.start(&address, &settings);
        saved.wait(-1).expect("saved");
        assert!(!source.runs());
        // SAFETY: the handle is valid.
        done(|e| unsafe { sterna_migration_resume_saved(saved.0, e) });
        assert!(source.runs());
        let incoming = target.listen(&address, &settings);

        assert_eq!(incoming.wait(-1), Ok(true));
        target.assert_guest();
    }
}

#[test]
fn paused_guest_stays_paused() {
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.boot();
    source.plain.runs.store(false, std::sync::atomic::Ordering::SeqCst);

    let migration = source.start(&incoming.address(), &Settings::new());

    migration.wait(-1).expect("completed");
    assert_eq!(incoming.wait(-1), Ok(false));
    target.assert_guest();
    assert!(!target.runs());
}
