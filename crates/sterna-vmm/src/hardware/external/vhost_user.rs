//! Virtio devices over vhost-user.
//!
//! The guest sees those whose kind is stated (`hardware::virtio`). Of another one whoever knows where its rings are says so by
//! [`VhostUserDevice::start`]. A device that was never started moves all the same.

use std::sync::Arc;

use sterna_devices::vhost_user::{VhostUserDevice, VhostUserLog, VhostUserOptions};
use sterna_ram::DirtySource;
use sterna_ram::dirty::VhostLog;

use crate::config::MachineConfig;
use crate::error::VmmError;
use crate::hardware::vm::KvmVm;

/// Connects to the back ends and gives them the machine's RAM; those of a guest that another process hands over come with it.
pub(super) fn connect(config: &MachineConfig, vm: &KvmVm) -> Result<Vec<Arc<VhostUserDevice>>, VmmError> {
    let ranges = vm.logged_ranges();
    let connect = |options: &VhostUserOptions| {
        let device = match config.incoming && config.takes_over {
            true => VhostUserDevice::awaiting(options.clone(), vm.ram(), &ranges),
            false => VhostUserDevice::connect(options.clone(), vm.ram(), &ranges),
        };
        device.map_err(|error| VmmError::Config { what: "vhost-user", why: error.to_string() })
    };
    config.vhost_user.iter().map(connect).collect()
}

/// What finds the back ends' writes: one log for all.
pub(super) fn dirty_source(
    devices: &[Arc<VhostUserDevice>],
    vm: &KvmVm,
) -> Result<Option<Arc<dyn DirtySource>>, VmmError> {
    if devices.is_empty() {
        return Ok(None);
    }
    let log = Arc::new(VhostLog::new(vm.ram(), vm.logged_ranges())?);
    Ok(Some(Arc::new(VhostUserLog::new(log, devices.to_vec()))))
}
