//! Connects the machine to vfio-user devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_devices::vfio::{PortError, VfioDevice};
use sterna_devices::vfio_user::{Client, ClientOptions, DmaLog};
use sterna_ram::DirtySource;

use crate::error::VmmError;
use crate::hardware::vm::KvmVm;

/// A connected vfio-user device.
pub(crate) struct VfioUser {
    pub(crate) client: Arc<Client>,
    /// The device stream, which the engine migrates.
    pub(crate) stream: Arc<VfioDevice<Arc<Client>>>,
}

/// Connects to the devices and gives them the machine's RAM.
pub(super) fn connect(paths: &[PathBuf], vm: &KvmVm) -> Result<Vec<VfioUser>, VmmError> {
    let ranges = vm.logged_ranges();
    let connect = |path: &PathBuf| {
        let failed = |error: PortError| refused(path, error.to_string());
        let client = Client::connect(path, &ClientOptions::default()).map_err(failed)?;
        if client.migration_features().is_none() {
            return Err(refused(path, "it cannot migrate; leave it out, or use a server that can".into()));
        }
        if !client.can_log_dma().map_err(failed)? {
            let why = "it cannot log the pages that it writes, so a migration would lose them; use a server that can";
            return Err(refused(path, why.into()));
        }
        client.map_ram(vm.ram(), &ranges).map_err(failed)?;
        let client = Arc::new(client);
        let stream =
            VfioDevice::new(Arc::clone(&client)).map_err(|error| refused(path, error.to_string()))?;
        Ok(VfioUser { client, stream: Arc::new(stream) })
    };
    paths.iter().map(connect).collect()
}

/// The dirty sources for the devices' writes, one per device.
pub(super) fn dirty_sources(devices: &[VfioUser], vm: &KvmVm) -> Result<Vec<Arc<dyn DirtySource>>, VmmError> {
    let log = |device: &VfioUser| {
        let log = DmaLog::new(Arc::clone(&device.client), vm.ram().clone(), vm.logged_ranges())?;
        Ok(Arc::new(log) as Arc<dyn DirtySource>)
    };
    devices.iter().map(log).collect()
}

fn refused(path: &Path, why: String) -> VmmError {
    VmmError::Config { what: "vfio-user", why: format!("{}: {why}", path.display()) }
}
