//! Devices in processes of their own, over vfio-user: connected when the machine is made, with all of its RAM.

use std::path::PathBuf;
use std::sync::Arc;

use sterna::{DeviceStream, VmError};
use sterna_devices::vfio::{PortError, VfioDevice};
use sterna_devices::vfio_user::{Client, ClientOptions, DmaLog};
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{DirtySource, GuestRam};

use super::{KvmMachine, Shared};
use crate::VmmError;
use crate::layout::Range;

/// One device.
pub(crate) struct VfioUser {
    pub(crate) client: Arc<Client>,
    /// What the engine moves.
    pub(crate) stream: Arc<VfioDevice<Arc<Client>>>,
}

/// Connects to the devices and gives them the machine's RAM.
pub(super) fn connect(
    paths: &[PathBuf],
    ram: &GuestRam,
    ranges: &[Range],
) -> Result<Vec<VfioUser>, VmmError> {
    let ranges = logged(ram, ranges);
    let connect = |path: &PathBuf| {
        let failed = |error: PortError| refused(path, error.to_string());
        let client = Client::connect(path, &ClientOptions::default()).map_err(failed)?;
        if client.migration_features().is_none() {
            return Err(refused(path, "it cannot migrate; leave it out, or use a server that can".into()));
        }
        if !client.can_log_dma().map_err(failed)? {
            let why =
                "it cannot log which pages it writes, so a migration would lose them; use a server that can";
            return Err(refused(path, why.into()));
        }
        client.map_ram(ram, &ranges).map_err(failed)?;
        let client = Arc::new(client);
        let stream =
            VfioDevice::new(Arc::clone(&client)).map_err(|error| refused(path, error.to_string()))?;
        Ok(VfioUser { client, stream: Arc::new(stream) })
    };
    paths.iter().map(connect).collect()
}

/// What finds the devices' writes.
pub(super) fn dirty_sources(
    devices: &[VfioUser],
    ram: &GuestRam,
    ranges: &[Range],
) -> Result<Vec<Arc<dyn DirtySource>>, VmmError> {
    let ranges = logged(ram, ranges);
    let log = |device: &VfioUser| {
        let log = DmaLog::new(Arc::clone(&device.client), ram.clone(), ranges.clone())?;
        Ok(Arc::new(log) as Arc<dyn DirtySource>)
    };
    devices.iter().map(log).collect()
}

impl KvmMachine {
    /// Tells the devices apart that are in other processes, in the order of [`crate::MachineConfig::vfio_user`].
    pub fn vfio_user(&self) -> Vec<Arc<Client>> {
        self.shared.vfio_user.iter().map(|device| Arc::clone(&device.client)).collect()
    }
}

impl Shared {
    /// The guest runs: its devices do before it.
    pub(super) fn run_devices(&self, machine: &str) {
        self.each_device(machine, "a device does not run", |device| device.run());
    }

    /// The guest was stopped by an operator: its devices do nothing either, all quiesced before one stops.
    pub(super) fn stop_devices(&self, machine: &str) {
        self.each_device(machine, "a device was not quiesced", |device| device.quiesce());
        self.each_device(machine, "a device did not stop", |device| device.stop());
    }

    /// All at once: one that does not answer holds the others up no longer than its own limit.
    fn each_device(
        &self,
        machine: &str,
        what: &str,
        act: impl Fn(&dyn DeviceStream) -> Result<(), VmError> + Sync,
    ) {
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
                // Out of threads: one behind the other, then.
                if thread.is_err() {
                    act(device);
                }
            }
        });
    }
}

pub(super) fn logged(ram: &GuestRam, ranges: &[Range]) -> Vec<LoggedRange> {
    let range = |range: &Range| LoggedRange {
        guest_address: range.start,
        block: range.block,
        first_page: 0,
        pages: ram.block(range.block).pages(),
    };
    ranges.iter().map(range).collect()
}

fn refused(path: &std::path::Path, why: String) -> VmmError {
    VmmError::Config { what: "vfio-user", why: format!("{}: {why}", path.display()) }
}
