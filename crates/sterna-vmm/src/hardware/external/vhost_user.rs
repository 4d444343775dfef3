//! Connects the machine to vhost-user devices.
//!
//! The guest sees the devices whose kind is configured (`hardware::virtio`). For another device, the caller
//! that knows its rings starts it with [`VhostUserDevice::start`]. A device that was never started migrates
//! as well.

use std::sync::Arc;

use sterna_devices::vhost_user::{VhostUserDevice, VhostUserLog, VhostUserOptions};
use sterna_ram::DirtySource;
use sterna_ram::dirty::VhostLog;

use crate::config::MachineConfig;
use crate::error::VmmError;
use crate::hardware::vm::KvmVm;

/// Connects to the back ends and gives them the machine's RAM. The back ends of a guest that another process
/// hands over arrive with that guest.
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

/// The dirty source for the back ends' writes: one log for all.
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
