//! `sterna migrate A rdma:HOST:PORT --dest-qmp B`, up to the point that needs an adapter.
//! A loopback address has none.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::save::Process;

fn migrate(source: &Process, destination: &Process, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["migrate", &source.socket(), "rdma:127.0.0.1:4444", "--dest-qmp", &destination.socket()])
        .args(more)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn parameter(vm: &Process, name: &str) -> Value {
    vm.vm().execute("query-migrate-parameters", Value::Null).unwrap()[name].clone()
}

#[test]
fn set_reaches_both_sides_and_a_missing_adapter_leaves_both_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let source = Process::start(directory.path().join("a"), &[]);
    let destination = Process::start(directory.path().join("b"), &["--incoming", "defer"]);

    let output = migrate(
        &source,
        &destination,
        &[
            "--set",
            "x-rdma-chunk-size=64M",
            "--set",
            "x-sterna-rdma-pinned-limit=1G",
            "--cap",
            "rdma-pin-all",
            "--keep-settings",
        ],
    );

    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("refused `migrate-incoming`: "), "{said}");
    for vm in [&source, &destination] {
        assert_eq!(parameter(vm, "x-rdma-chunk-size"), 64 << 20);
        assert_eq!(parameter(vm, "x-sterna-rdma-pinned-limit"), 1 << 30);
    }
    assert_eq!(source.vm().run_state().unwrap(), "running");
    assert_eq!(destination.vm().run_state().unwrap(), "inmigrate");
    assert_eq!(destination.vm().progress().unwrap().status, "none");
}

#[test]
fn tls_over_rdma_is_refused_before_anything_is_set() {
    let directory = tempfile::tempdir().unwrap();
    let source = Process::start(directory.path().join("a"), &[]);
    let destination = Process::start(directory.path().join("b"), &["--incoming", "defer"]);

    let output = migrate(&source, &destination, &["--set", "x-rdma-chunk-size=64M", "--tls-dir", "/nowhere"]);

    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("TLS cannot protect rdma:"), "{said}");
    for vm in [&source, &destination] {
        assert_eq!(parameter(vm, "x-rdma-chunk-size"), 1 << 20);
    }
}
