//! Checks whether a QEMU can be protected. It only queries, and changes nothing.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::disks;
use super::nics::{Nic, nics};
use super::request::ProtectRequest;
use crate::error::DriveError;
use crate::settings::Settings;
use crate::vm::Vm;

/// Capabilities that a protection needs, followed by capabilities that exclude it.
const NEEDED: [&str; 3] = ["x-colo", "return-path", "events"];
const UNWANTED: [&str; 11] = [
    "postcopy-ram",
    "pause-before-switchover",
    "release-ram",
    "background-snapshot",
    "mapped-ram",
    "x-ignore-shared",
    "switchover-ack",
    "zero-copy-send",
    "dirty-bitmaps",
    "postcopy-preempt",
    "xbzrle",
];

/// The result of a successful check.
pub(super) struct Fit {
    pub(super) nics: Vec<Nic>,
    pub(super) settings: Settings,
    /// A disk that the guest writes and that is not copied to the standby.
    pub(super) shared_disk: Option<String>,
    /// Sentences that the operator should read.
    pub(super) remarks: Vec<String>,
}

/// Queries QEMU and compares the answers with the requirements of a protection.
///
/// # Errors
/// The reason why this QEMU cannot be protected, in one sentence.
pub(super) fn check(vm: &mut Vm, request: &ProtectRequest, pid: Option<u32>) -> Result<Fit, DriveError> {
    let major = vm.client().version()["qemu"]["major"].as_u64().unwrap_or(0);
    if vm.is_sterna() || major < 11 {
        return Err(unfit(format!(
            "{} is {}: only a QEMU of version 11 or later can be protected",
            vm.at(),
            vm.version()
        )));
    }
    let mode = vm.execute("query-colo-status", Value::Null)?["mode"].clone();
    if mode != "none" {
        return Err(unfit(format!(
            "{0} is in COLO already (mode {mode}). If a `sterna protect` was killed: make sure that the standby does \
             not run the guest and never will, and run `sterna unprotect {0} --vouch`",
            vm.at()
        )));
    }
    let progress = vm.progress()?;
    if !progress.is_over() {
        return Err(unfit(format!("{} has a running migration (`{}`)", vm.at(), progress.status)));
    }
    let state = vm.run_state()?;
    if state != "running" {
        return Err(unfit(format!(
            "the guest of {} is `{state}`, but a protection makes QEMU start it: start it yourself first (`cont`)",
            vm.at()
        )));
    }
    let settings = Settings::read(vm)?;
    if let Some(missing) = NEEDED.iter().find(|name| settings.capability(name).is_none()) {
        return Err(unfit(format!("{} does not know the capability {missing}", vm.at())));
    }
    let table = vm.client().human("info network").map_err(|error| vm.error(error))?;
    let nics = nics(&table)?;
    let others = disks::check(vm, &request.disks)?;
    let shared_disk = others.first().map(|disk| disk.name.clone());
    let mut remarks: Vec<_> = others.into_iter().map(|disk| disk.remark).collect();
    if nics.is_empty() {
        remarks.push("the machine has no network card with a netdev: no output is held back".to_owned());
    }
    if nics.iter().any(Nic::may_have_vhost) {
        match pid.map(has_vhost) {
            Some(Ok(true)) => {
                return Err(unfit(
                    "QEMU uses vhost-net (vhost=on): its packets do not pass through QEMU, so they cannot be held back; \
                     use vhost=off"
                        .to_owned(),
                ));
            }
            Some(Ok(false)) => {}
            _ => remarks.push(
                "it is unknown whether a tap has vhost=on, with which output is not held back: make sure that it has \
                 vhost=off"
                    .to_owned(),
            ),
        }
    }
    Ok(Fit { nics, settings, shared_disk, remarks })
}

/// The capability settings of a protection.
pub(super) fn capabilities(request: &ProtectRequest) -> Vec<(&'static str, bool)> {
    let needed = NEEDED.map(|name| (name, true));
    let unwanted = UNWANTED.map(|name| (name, false));
    let multifd = [("multifd", request.channels > 0)];
    // Switch off first, because some capabilities exclude each other.
    unwanted.into_iter().chain(multifd).chain(needed).collect()
}

/// The parameter settings of a protection.
pub(super) fn parameters(request: &ProtectRequest) -> Map<String, Value> {
    let mut parameters = request.parameters.clone();
    let mut put = |name: &str, value: Value| {
        parameters.insert(name.to_owned(), value);
    };
    put("x-checkpoint-delay", json!(request.checkpoint_delay.as_millis() as u64));
    // This program encrypts the connection to the standby. QEMU's connection to this program is a Unix socket.
    put("tls-creds", json!(""));
    put("tls-hostname", json!(""));
    put("mode", json!("normal"));
    if request.channels > 0 {
        put("multifd-channels", json!(request.channels));
    }
    parameters
}

/// Whether the process has `/dev/vhost-net` open.
fn has_vhost(pid: u32) -> std::io::Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor that was closed in the meantime does not count.
        if std::fs::read_link(entry?.path()).is_ok_and(|to| to == Path::new("/dev/vhost-net")) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn unfit(why: String) -> DriveError {
    DriveError::Unfit(why)
}
