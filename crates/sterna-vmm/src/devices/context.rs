//! What devices save and load, and how far a machine that loads has come.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use sterna::{Device, VmError};

use super::codec::{Fields, StateError};
use super::tsc::TscAnchor;
use crate::hardware::Hardware;
use crate::vcpus::Vcpus;

/// What a machine's devices share.
pub(crate) struct Context {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) vcpus: Arc<Vcpus>,
    loading: Mutex<Loading>,
}

/// What a machine that loads has got so far: sections come in save order.
#[derive(Debug, Default)]
pub(crate) struct Loading {
    /// Name and instance of each section, in save order.
    order: Vec<(String, u32)>,
    /// How many of them were loaded: the first ones.
    loaded: usize,
    /// How vCPU 0's TSC was set; the others follow it.
    pub(crate) tsc: Option<TscAnchor>,
}

impl Context {
    /// Nothing can be loaded yet: see [`Loading::expect_all`].
    pub(crate) fn new(hardware: Arc<Hardware>, vcpus: Arc<Vcpus>) -> Self {
        Self { hardware, vcpus, loading: Mutex::default() }
    }

    pub(crate) fn loading(&self) -> MutexGuard<'_, Loading> {
        self.loading.lock()
    }

    /// Runs a device's load: order first, then the body; notes that it was loaded.
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
    /// From now on these sections are expected, each once and in this order.
    pub(crate) fn expect_all(&mut self, devices: &[Arc<dyn Device>]) {
        let order = devices.iter().map(|device| (device.name(), device.instance())).collect();
        *self = Self { order, ..Self::default() };
    }

    /// The first section that is missing.
    pub(crate) fn missing(&self) -> Option<String> {
        self.order.get(self.loaded).map(|(name, instance)| format!("{name} {instance}"))
    }

    /// Section (`name`, `instance`) may be loaded: those that go before it were, itself was not.
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

/// Names a failed save.
pub(crate) fn saving(device: &dyn Device, result: Result<Vec<u8>, StateError>) -> Result<Vec<u8>, VmError> {
    result.map_err(|error| VmError::new(format!("saving {} {}", device.name(), device.instance()), error))
}
