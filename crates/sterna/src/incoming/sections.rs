//! Assigns sections of the stream to devices.

use std::sync::Arc;

use sterna_wire::extension::{COMPATIBILITY_SECTION, Handover};
use sterna_wire::global_state;
use sterna_wire::main::{BodyKind, SectionKind, SectionKnowledge};
use sterna_wire::multifd::DeviceChunk;

use super::checkpoints;
use crate::error::{MachineDifference, MigrationError};
use crate::streams::{self, MOST_CHUNK_BYTES};
use crate::vm::{Device, TargetVm};

/// The sections that this side knows.
pub(super) struct Sections {
    devices: Vec<Arc<dyn Device>>,
    compatibility: Option<Arc<dyn Device>>,
}

impl Sections {
    pub(super) fn new(vm: &dyn TargetVm) -> Self {
        Self { devices: vm.devices(), compatibility: vm.compatibility() }
    }

    pub(super) fn find(&self, name: &str, instance: u32) -> Option<&Arc<dyn Device>> {
        if name == COMPATIBILITY_SECTION {
            return self.compatibility.as_ref();
        }
        self.devices.iter().find(|device| device.name() == name && device.instance() == instance)
    }

    /// The device whose stream uses the section `name`.
    fn find_stream(&self, name: &str, instance: u32) -> Option<&Arc<dyn Device>> {
        let device = self.find(streams::device_of_section(name)?, instance)?;
        device.stream().is_some().then_some(device)
    }

    /// Limit for the sum of all section bodies, in bytes.
    pub(super) fn most_bytes(&self) -> u64 {
        let bodies: usize =
            self.devices.iter().chain(&self.compatibility).map(|device| device.body_limit()).sum();
        (bodies
            + Handover::BODY_BYTES
            + global_state::BODY_BYTES
            + checkpoints::SECTIONS.iter().map(|(_, most)| most).sum::<usize>()) as u64
    }
}

impl SectionKnowledge for Sections {
    fn body(&self, name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind {
        if name == "ram" {
            return BodyKind::Ram;
        }
        if kind != SectionKind::Full && self.find_stream(name, instance).is_some() {
            let most = MOST_CHUNK_BYTES + DeviceChunk::MAX_BYTES;
            return BodyKind::Passing { most };
        }
        if kind != SectionKind::Full {
            return BodyKind::Refuse(format!("{name:?} is sent in parts, which no device here supports"));
        }
        if name == global_state::SECTION_NAME {
            return BodyKind::FixedLength(global_state::BODY_BYTES);
        }
        if name == Handover::SECTION_NAME {
            return BodyKind::LengthPrefixed { most: Handover::BODY_BYTES };
        }
        if let Some((_, most)) = checkpoints::section(name) {
            return BodyKind::LengthPrefixed { most: *most };
        }
        match self.find(name, instance) {
            None => BodyKind::Refuse(format!(
                "this machine has no device {name:?}, instance {instance}: give both machines the same devices"
            )),
            Some(device) if version > device.version() || version < device.oldest_version() => {
                BodyKind::Refuse(format!(
                    "the version of device {name:?} is {version}, but this side knows {} to {}: migrate between \
                     equal versions",
                    device.oldest_version(),
                    device.version()
                ))
            }
            Some(device) => BodyKind::LengthPrefixed { most: device.body_limit() },
        }
    }
}

/// Checks that the state of every device of this side has arrived.
pub(super) fn all_came(vm: &dyn TargetVm, came: &[(String, u32)]) -> Result<(), MigrationError> {
    for device in vm.devices() {
        let (name, instance) = (device.name(), device.instance());
        if !came.iter().any(|(n, i)| *n == name && *i == instance) {
            return Err(MachineDifference::NoState { device: name, instance }.into());
        }
    }
    Ok(())
}
