//! Devices that other processes serve. The machine connects to them when it is built, and gives them all of
//! its RAM.

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

/// All devices of a machine in other processes, in the order of its configuration.
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

    /// Names one of the devices for messages, or `None` if there is none. The devices have mapped the
    /// machine's RAM.
    pub(crate) fn name(&self) -> Option<String> {
        match (self.vhost_user.len(), self.vfio_user.len()) {
            (0, 0) => None,
            (0, _) => Some("vfio-user device 0".to_owned()),
            _ => Some("vhost-user device 0".to_owned()),
        }
    }

    /// Names a device that prevents a handover between two processes of this host. `None` if there is none.
    ///
    /// vfio-user devices can neither follow a guest nor use memory that another process hands over. In a
    /// machine without a guest, a connected back end is not the incoming guest's.
    pub(crate) fn cannot_follow(&self, has_guest: bool) -> Option<String> {
        if !self.vfio_user.is_empty() {
            return Some("vfio-user device 0".to_owned());
        }
        let stays = |device: &Arc<VhostUserDevice>| !has_guest && !device.is_awaited();
        let index = self.vhost_user.iter().position(stays)?;
        Some(format!("vhost-user device {index}"))
    }

    /// Introduces this process to the back ends of a handed-over guest, before the guest runs. A failure is
    /// logged.
    pub(crate) fn introduce(&self, machine: &str) {
        for device in self.vhost_user.iter().filter(|device| device.is_awaited()) {
            if let Err(error) = device.introduce() {
                tracing::error!(machine, %error, "a device's process did not receive the message about its guest's \
                                                  arrival");
            }
        }
    }

    /// The dirty sources for the devices' writes.
    pub(crate) fn dirty_sources(&self, vm: &KvmVm) -> Result<Vec<Arc<dyn DirtySource>>, VmmError> {
        let mut sources = vfio_user::dirty_sources(&self.vfio_user, vm)?;
        sources.extend(vhost_user::dirty_source(&self.vhost_user, vm)?);
        Ok(sources)
    }

    /// Starts the devices before the guest runs. A device that cannot run is logged.
    pub(crate) fn run(&self, machine: &str) {
        self.each(machine, "a device does not run", |device| device.run());
    }

    /// Stops the devices after an operator paused the guest. All are quiesced before the first one stops. A
    /// failure is logged.
    pub(crate) fn stop(&self, machine: &str) {
        self.each(machine, "a device was not quiesced", |device| device.quiesce());
        self.each(machine, "a device did not stop", |device| device.stop());
    }

    /// Calls `act` for all devices in parallel. A device that does not answer delays the others at most by
    /// its own time limit.
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
                // No thread is available, so the devices are served one after the other.
                if thread.is_err() {
                    act(device);
                }
            }
        });
    }
}
