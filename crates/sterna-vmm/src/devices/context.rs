//! The shared objects of a machine's devices, and the order in which sections are loaded.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use sterna::{Device, VmError};

use super::codec::{Fields, StateError};
use super::tsc::TscAnchor;
use crate::hardware::Hardware;
use crate::vcpus::Vcpus;

/// Objects that the devices of a machine share.
pub(crate) struct Context {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) vcpus: Arc<Vcpus>,
    loading: Mutex<Loading>,
}

/// Progress of a machine that loads its sections, in save order.
#[derive(Debug, Default)]
pub(crate) struct Loading {
    /// Name and instance of each section, in save order.
    order: Vec<(String, u32)>,
    /// Number of sections loaded so far. They are the first ones of `order`.
    loaded: usize,
    /// How vCPU 0's TSC was set. The other vCPUs are set relative to it.
    pub(crate) tsc: Option<TscAnchor>,
}

impl Context {
    /// A context that loads nothing until [`Loading::expect_all`] is called.
    pub(crate) fn new(hardware: Arc<Hardware>, vcpus: Arc<Vcpus>) -> Self {
        Self { hardware, vcpus, loading: Mutex::default() }
    }

    pub(crate) fn loading(&self) -> MutexGuard<'_, Loading> {
        self.loading.lock()
    }

    /// Loads a device's body after a check of the section's order. Records that it was loaded.
    pub(crate) fn load(
        &self,
        device: &dyn Device,
        body: &[u8],
        apply: impl FnOnce(&mut Fields<'_>) -> Result<(), StateError>,
    ) -> Result<(), VmError> {
        let (name, instance) = (device.name(), device.instance());
        let attempt = || {
            self.loading().expect(&name, instance)?;
            let mut fields = Fields::parse(body)?;
            apply(&mut fields)?;
            fields.finish()
        };
        attempt().map_err(|error| VmError::new(format!("loading {name} {instance}"), error))?;
        self.loading().loaded += 1;
        Ok(())
    }
}

impl Loading {
    /// Starts a load that expects these sections, each once and in this order.
    pub(crate) fn expect_all(&mut self, devices: &[Arc<dyn Device>]) {
        let order = devices.iter().map(|device| (device.name(), device.instance())).collect();
        *self = Self { order, ..Self::default() };
    }

    /// The first section that was not loaded yet.
    pub(crate) fn missing(&self) -> Option<String> {
        self.order.get(self.loaded).map(|(name, instance)| format!("{name} {instance}"))
    }

    /// Checks that section (`name`, `instance`) is the next one to load.
    fn expect(&self, name: &str, instance: u32) -> Result<(), StateError> {
        let is_it = |section: &(String, u32)| section.0 == name && section.1 == instance;
        if self.order[..self.loaded].iter().any(is_it) {
            return Err(StateError::Twice);
        }
        match self.order.get(self.loaded) {
            Some(next) if !is_it(next) => {
                Err(StateError::Order { missing: format!("{} {}", next.0, next.1) })
            }
            _ => Ok(()),
        }
    }
}

/// Adds the device's name to the error of a failed save.
pub(crate) fn saving(device: &dyn Device, result: Result<Vec<u8>, StateError>) -> Result<Vec<u8>, VmError> {
    result.map_err(|error| VmError::new(format!("saving {} {}", device.name(), device.instance()), error))
}
