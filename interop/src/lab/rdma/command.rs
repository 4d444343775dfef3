//! The `sterna` command over RDMA, as an operator runs it: `migrate` between two QEMUs, `demo` between two
//! Sternas.

use std::process::Output;

use serde_json::{Value, json};

use super::Scenario;
use super::way::{Source, Way, ram, same, still};
use crate::scenarios::Failure;
use crate::{Qemu, sterna};

pub(super) fn scenarios() -> Vec<Scenario> {
    let unlike = "sterna migrate between two QEMUs over RDMA, chunk sizes compared and set";
    vec![
        Scenario::short(unlike, drives),
        Scenario::long("sterna demo over RDMA", || demo(&["--set=x-rdma-chunk-size=4M"])),
        Scenario::long("sterna demo over RDMA, all pinned", || demo(&["--cap=rdma-pin-all"])),
        Scenario::long("sterna demo over RDMA, a limit of pinned memory", || {
            demo(&["--set=x-sterna-rdma-pinned-limit=16M"])
        }),
    ]
}

/// Moves a guest that writes its memory between two of Sterna's machines. It is checked at the destination.
fn demo(more: &[&str]) -> Result<(), Failure> {
    let mut command = sterna();
    command.args([
        "demo",
        "--machine=process",
        "--ram=64M",
        "--rate=2000",
        "--channels=0",
        "--warm-up=0.2",
        "--json",
    ]);
    let output = command.arg("--address").arg(Way::PLAIN.uri()).args(more).output();
    let output = output.map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    let record: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let written = record["statistics"]["rdma"]["written_bytes"].as_u64();
    if record["check"]["passed"] != true || written.is_none_or(|bytes| bytes < 32 << 20) {
        return Err(format!("{record}"));
    }
    Ok(())
}

/// Larger chunks at the source are refused before any change. The message names the option that helps. With
/// that option the RAM arrives.
fn drives() -> Result<(), Failure> {
    let mut source = Source::default();
    let (source, left) = source.get()?;
    source.parameters(json!({"x-rdma-chunk-size": 4 << 20, "max-bandwidth": 0}))?;
    let mut destination = still()?.incoming_defer().spawn()?;
    let uri = Way::PLAIN.uri();

    let refused = migrate(source, &uri, &destination, &[])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let words = ["4 MiB at", "1 MiB at", "`--set x-rdma-chunk-size=4M`"];
    if refused.status.code() != Some(1) || !words.iter().all(|word| said.contains(word)) {
        return Err(format!("{}: {said}", refused.status));
    }
    let state = destination.status()?;
    let chunk = destination.parameters_set()?["x-rdma-chunk-size"].clone();
    if state != "inmigrate" || chunk != 1 << 20 {
        return Err(format!("the destination is {state}, with chunks of {chunk} bytes"));
    }

    let output = migrate(source, &uri, &destination, &["--set", "x-rdma-chunk-size=4M"])?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    let record: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    if record["statistics"]["status"] != "completed" {
        return Err(format!("{record}"));
    }
    same(left, &ram(&destination)?)
}

fn migrate(source: &Qemu, uri: &str, destination: &Qemu, more: &[&str]) -> Result<Output, Failure> {
    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg(uri).arg("--dest-qmp");
    command.arg(destination.operator_socket()).arg("--json").args(more);
    command.output().map_err(|error| error.to_string())
}
