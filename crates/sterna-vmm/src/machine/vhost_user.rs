//! Virtio devices in processes of their own, over vhost-user: connected when the machine is made, with all of its RAM.
//!
//! The machine has no virtio transport: whoever knows where the guest's driver put its rings says so by
//! [`VhostUserDevice::start`]. A device that was never started moves all the same.

use std::sync::Arc;

use sterna_devices::vhost_user::{VhostUserDevice, VhostUserLog, VhostUserOptions};
use sterna_ram::dirty::VhostLog;
use sterna_ram::{DirtySource, GuestRam};

use super::KvmMachine;
use super::vfio_user::logged;
use crate::VmmError;
use crate::layout::Range;

/// Connects to the back ends and gives them the machine's RAM.
pub(super) fn connect(
    devices: &[VhostUserOptions],
    ram: &GuestRam,
    ranges: &[Range],
) -> Result<Vec<Arc<VhostUserDevice>>, VmmError> {
    let ranges = logged(ram, ranges);
    let connect = |options: &VhostUserOptions| {
        VhostUserDevice::connect(options.clone(), ram, &ranges)
            .map_err(|error| VmmError::Config { what: "vhost-user", why: error.to_string() })
    };
    devices.iter().map(connect).collect()
}

/// What finds the back ends' writes: one log for all.
pub(super) fn dirty_source(
    devices: &[Arc<VhostUserDevice>],
    ram: &GuestRam,
    ranges: &[Range],
) -> Result<Option<Arc<dyn DirtySource>>, VmmError> {
    if devices.is_empty() {
        return Ok(None);
    }
    let log = Arc::new(VhostLog::new(ram, logged(ram, ranges))?);
    Ok(Some(Arc::new(VhostUserLog::new(log, devices.to_vec()))))
}

impl KvmMachine {
    /// The virtio devices in other processes, in the order of [`crate::MachineConfig::vhost_user`]: to start their
    /// rings, kick them and hear from them.
    pub fn vhost_user(&self) -> Vec<Arc<VhostUserDevice>> {
        self.shared.vhost_user.clone()
    }
}
