//! Devices in processes of their own: connected when the machine is made, with all of its RAM.

mod vfio_user;
mod vhost_user;

use std::sync::Arc;

use sterna::{DeviceStream, VmError};
use sterna_devices::vhost_user::VhostUserDevice;
use sterna_ram::DirtySource;

use super::vm::KvmVm;
use crate::config::MachineConfig;
use crate::error::VmmError;
pub(crate) use vfio_user::VfioUser;

/// All that a machine has, in the order of its configuration.
pub(crate) struct ExternalDevices {
    pub(crate) vfio_user: Vec<VfioUser>,
    pub(crate) vhost_user: Vec<Arc<VhostUserDevice>>,
}

impl ExternalDevices {
    /// Connects to the devices and gives them the machine's RAM.
    pub(crate) fn connect(config: &MachineConfig, vm: &KvmVm) -> Result<Self, VmmError> {
        Ok(Self {
            vfio_user: vfio_user::connect(&config.vfio_user, vm)?,
            vhost_user: vhost_user::connect(config, vm)?,
        })
    }

    /// One of them, for messages; none if there is none. They have the machine's RAM mapped.
    pub(crate) fn name(&self) -> Option<String> {
        match (self.vhost_user.len(), self.vfio_user.len()) {
            (0, 0) => None,
            (0, _) => Some("vfio-user device 0".to_owned()),
            _ => Some("vhost-user device 0".to_owned()),
        }
    }

    /// One that could not follow the guest to another process of this host, or into memory that comes from one; none if all can.
    /// Without a guest, a back end that is connected to is another one than the guest's.
    pub(crate) fn cannot_follow(&self, has_guest: bool) -> Option<String> {
        if !self.vfio_user.is_empty() {
            return Some("vfio-user device 0".to_owned());
        }
        let stays = |device: &Arc<VhostUserDevice>| !has_guest && !device.is_awaited();
        let index = self.vhost_user.iter().position(stays)?;
        Some(format!("vhost-user device {index}"))
    }

    /// A guest has arrived and does not run yet: back ends that came with it hear of this process. One that does not is logged.
    pub(crate) fn introduce(&self, machine: &str) {
        for device in self.vhost_user.iter().filter(|device| device.is_awaited()) {
            if let Err(error) = device.introduce() {
                tracing::error!(machine, %error, "a device's process was not told of its guest's arrival");
            }
        }
    }

    /// What finds the devices' writes.
    pub(crate) fn dirty_sources(&self, vm: &KvmVm) -> Result<Vec<Arc<dyn DirtySource>>, VmmError> {
        let mut sources = vfio_user::dirty_sources(&self.vfio_user, vm)?;
        sources.extend(vhost_user::dirty_source(&self.vhost_user, vm)?);
        Ok(sources)
    }

    /// The guest runs: its devices do before it. One that cannot is logged.
    pub(crate) fn run(&self, machine: &str) {
        self.each(machine, "a device does not run", |device| device.run());
    }

    /// The guest was stopped by an operator: its devices do nothing either, all quiesced before one stops. One that
    /// does not is logged.
    pub(crate) fn stop(&self, machine: &str) {
        self.each(machine, "a device was not quiesced", |device| device.quiesce());
        self.each(machine, "a device did not stop", |device| device.stop());
    }

    /// All at once: one that does not answer holds the others up no longer than its own limit.
    fn each(&self, machine: &str, what: &str, act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync) {
        let vfio = self.vfio_user.iter().map(|device| device.stream.as_ref() as &dyn DeviceStream);
        let vhost = self.vhost_user.iter().map(|device| device.as_ref() as &dyn DeviceStream);
        let act = &|device: &dyn DeviceStream| {
            if let Err(error) = act(device) {
                tracing::error!(machine, %error, "{what}");
            }
        };
        std::thread::scope(|scope| {
            for device in vfio.chain(vhost) {
                let thread = std::thread::Builder::new().spawn_scoped(scope, move || act(device));
                // Out of threads: one after the other, then.
                if thread.is_err() {
                    act(device);
                }
            }
        });
    }
}
