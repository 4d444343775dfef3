//! A VM for the benchmark: a small guest in this process, with [`BenchDevice`]s plugged in.

use std::sync::Arc;

use sterna::ram::{DirtySource, GuestRam};
use sterna::{Device, RunState, SourceVm, TargetVm, Vm, VmError};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use super::device::{BenchDevice, Plugged};

/// The guest and its devices.
pub struct Machine {
    guest: Arc<ProcessGuest>,
    devices: Vec<Arc<dyn Device>>,
}

impl Machine {
    /// A VM with a running guest (`is_source`), or one that waits for a migration.
    ///
    /// # Errors
    /// Memory or a thread could not be allocated.
    pub fn new(ram_bytes: u64, devices: &[Arc<BenchDevice>], is_source: bool) -> Result<Arc<Self>, VmError> {
        let config = ProcessConfig {
            blocks: vec![("ram".into(), ram_bytes)],
            // The guest writes only a little, because the benchmark measures the devices.
            rate: 100,
            workers: 1,
            working_set_pages: Some(16),
            fill: Fill::Random(5),
            ..ProcessConfig::default()
        };
        let guest = match is_source {
            true => ProcessGuest::boot(config),
            false => ProcessGuest::waiting(config),
        };
        let guest = guest.map_err(|error| VmError::new("make a guest", error))?;
        if is_source {
            guest.cont()?;
        } else {
            // RAM is touched before the run. Page faults at the destination would take half of the time and
            // are not measured here.
            let ram = guest.ram();
            let populated = ram.blocks().iter().try_for_each(|block| block.populate(0, block.pages()));
            populated.map_err(|error| VmError::new("allocate memory", error))?;
        }
        let plugged = devices.iter().map(|device| Arc::new(Plugged(Arc::clone(device))) as Arc<dyn Device>);
        let devices = guest.devices().into_iter().chain(plugged).collect();
        Ok(Arc::new(Self { guest, devices }))
    }
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.clone()
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.guest.stop()
    }
    fn quiesce(&self) -> Result<(), VmError> {
        self.guest.quiesce()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.guest.resume()
    }
}

impl TargetVm for Machine {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.guest.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.guest.start()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}
