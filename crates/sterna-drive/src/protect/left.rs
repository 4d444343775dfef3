//! Finds and removes the remains of a protection whose `sterna protect` was killed or detached.

use serde_json::{Value, json};

use super::disks;
use super::gates;
use super::leave::{self, LEAVE_LIMIT};
use super::names::{DISK_PREFIX, PREFIX};
use crate::error::DriveError;
use crate::settings::Settings;
use crate::vm::{ANSWER_LIMIT, Vm};

/// Capabilities that a protection sets, with QEMU's defaults. The operator's earlier values are not known any more.
const CAPABILITIES: [(&str, bool); 3] = [("x-colo", false), ("return-path", false), ("multifd", false)];
/// QEMU's default of `x-checkpoint-delay`, in milliseconds.
const CHECKPOINT_DELAY: u64 = 20_000;

/// The remains of a protection in a QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftProtection {
    /// Filters that redirect the guest's output to a gate.
    pub filters: Vec<String>,
    /// Character devices that connect QEMU to a gate.
    pub chardevs: Vec<String>,
    /// Block nodes that write to the standby.
    pub nodes: Vec<String>,
    /// Whether a program is connected to a gate. If so, a `sterna protect` is active.
    pub is_in_use: bool,
    /// Whether the capability `x-colo` is on.
    pub has_colo: bool,
    /// Status of QEMU's migration, from `query-migrate`.
    pub migration: String,
    /// Run state of the guest, from `query-status`.
    pub guest: String,
}

/// The result of [`LeftProtection::remove`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftRemoved {
    /// Whether QEMU's guest runs.
    pub runs_here: bool,
    /// Whether the settings of the protection are reset.
    pub are_settings_off: bool,
    /// Sentences about steps that failed.
    pub left: Vec<String>,
}

impl LeftProtection {
    /// Queries QEMU, and changes nothing.
    ///
    /// # Errors
    /// The monitor's error.
    pub fn look(vm: &mut Vm) -> Result<Self, DriveError> {
        vm.client().set_limit(ANSWER_LIMIT);
        let objects = vm.execute("qom-list", json!({"path": "/objects"}))?;
        let devices = vm.execute("query-chardev", Value::Null)?;
        let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
        let named = |list: &Value, member: &str, prefix: &str| -> Vec<String> {
            let names = list.as_array().into_iter().flatten().filter_map(|entry| entry[member].as_str());
            names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
        };
        let is_connected = |device: &Value| {
            let is_gates = device["label"].as_str().is_some_and(|label| label.starts_with(PREFIX));
            is_gates && !device["filename"].as_str().unwrap_or_default().starts_with("disconnected:")
        };
        Ok(Self {
            filters: named(&objects, "name", PREFIX),
            chardevs: named(&devices, "label", PREFIX),
            nodes: named(&nodes, "node-name", DISK_PREFIX),
            is_in_use: devices.as_array().into_iter().flatten().any(is_connected),
            has_colo: Settings::read(vm)?.capability("x-colo") == Some(true),
            migration: vm.progress()?.status,
            guest: vm.run_state()?,
        })
    }

    /// Whether QEMU has no remains of a protection.
    pub fn is_empty(&self) -> bool {
        let things = [&self.filters, &self.chardevs, &self.nodes];
        things.iter().all(|names| names.is_empty()) && !self.has_colo && self.migration != "colo"
    }

    /// Takes QEMU out of COLO with its guest running, and removes all remains. Each step is tried, even if others
    /// fail.
    ///
    /// Call it only if the standby does not run the guest and never can: this function does not ask an arbiter.
    pub fn remove(vm: &mut Vm) -> LeftRemoved {
        let mut left = Vec::new();
        let mut runs_here = true;
        let mut ask = |command: &str, arguments| {
            vm.client().set_limit(LEAVE_LIMIT);
            vm.execute(command, arguments)
        };
        let left_colo = leave::leave(&mut ask, None);
        match left_colo {
            Ok(migration) => left.extend(leave::of_migration(&migration)),
            Err(error) => {
                runs_here = false;
                left.push(error.to_string());
            }
        }
        let mut note = |what: &str, done: Result<(), DriveError>| {
            if let Err(error) = done {
                left.push(format!("{what}: {error}"));
            }
        };
        note("removing the gates", gates::remove_left_ones(vm).map(drop));
        note("removing the disks' children", disks::remove_left_ones(vm).map(drop));
        let put_back = put_back(vm);
        let are_settings_off = put_back.is_ok();
        note("switching x-colo off", put_back);
        LeftRemoved { runs_here, are_settings_off, left }
    }
}

fn put_back(vm: &mut Vm) -> Result<(), DriveError> {
    vm.client().set_limit(ANSWER_LIMIT);
    let settings = Settings::read(vm)?;
    if settings.capability("x-colo") != Some(true) {
        return Ok(());
    }
    let known = CAPABILITIES.iter().filter(|(name, _)| settings.capability(name).is_some());
    let states: Vec<Value> = known.map(|(name, state)| json!({"capability": name, "state": state})).collect();
    let capabilities = vm.execute("migrate-set-capabilities", json!({ "capabilities": states })).map(drop);
    let delay = json!({ "x-checkpoint-delay": CHECKPOINT_DELAY });
    let parameters = vm.execute("migrate-set-parameters", delay).map(drop);
    capabilities.and(parameters)
}
