//! The machine's state as it moves, one module a device.
//!
//! Sections are saved and loaded in this order: `kvm-clock`, `serial`, `vfio-user/` and
//! `vhost-user/` each from 0, `cpu` 0 to n−1, `irqchip`, `pit`.
//! A vCPU's LAPIC comes before the IOAPIC, whose loading may deliver an interrupt to it; the PIT comes
//! last, since it ticks from the moment it is loaded, guest or none. [`Loading`] refuses another order,
//! and a machine that was not given all sections takes nothing over.
//!
//! # Bodies
//! A body is a list of fields ([`codec`]). The kernel's structures travel as they are: their layout is
//! ABI, little-endian, without padding. *Compatibility rule*: a field that every reader must understand,
//! or a changed meaning, raises the section's version; a reader takes versions from 1 to its own and
//! refuses fields it does not know, so nothing of the state is ever dropped in silence.
//!
//! # Time
//! Guest time goes on while the guest moves: TSC, kvmclock and LAPIC deadlines continue as if the vCPUs
//! had only been stopped, and a guest that reads its clocks before and after sees how long it stood still.
//! What has passed is read off CLOCK_REALTIME on both sides, so between hosts it is as good as their NTP;
//! a destination whose clock is behind lets time stand still, never go back.

pub(crate) mod clock;
pub(crate) mod codec;
pub(crate) mod compat;
pub(crate) mod cpu;
pub(crate) mod irqchip;
pub(crate) mod msrs;
pub(crate) mod outside;
pub(crate) mod pit;
pub(crate) mod serial;
pub(crate) mod tsc;

use std::collections::BTreeSet;
use std::sync::Arc;

use sterna::{Device, Hook, VmError};

use crate::machine::Shared;
use codec::StateError;
pub(crate) use msrs::known as known_msrs;
use tsc::TscAnchor;

/// All devices, in save order.
pub(crate) fn all(shared: &Arc<Shared>) -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> = vec![
        Arc::new(clock::KvmClock(Arc::clone(shared))),
        Arc::new(serial::SerialConsole(Arc::clone(shared))),
    ];
    devices.extend(outside::all(shared));
    for index in 0..shared.vcpus.len() {
        devices.push(Arc::new(cpu::Cpu { shared: Arc::clone(shared), index }));
    }
    devices.push(Arc::new(irqchip::Irqchip(Arc::clone(shared))));
    devices.push(Arc::new(pit::Pit(Arc::clone(shared))));
    devices
}

/// The record that both sides must agree on.
pub(crate) fn compatibility(shared: &Arc<Shared>) -> Arc<dyn Device> {
    Arc::new(compat::Compatibility(Arc::clone(shared)))
}

/// What a machine that loads has got so far.
#[derive(Debug, Default)]
pub(crate) struct Loading {
    loaded: BTreeSet<(String, u32)>,
    /// How vCPU 0's TSC was set; the others follow it.
    pub(crate) tsc: Option<TscAnchor>,
}

impl Loading {
    /// Section (`name`, `instance`) may be loaded: those that go before it were, itself was not.
    fn expect(&self, order: &[Arc<dyn Device>], name: &str, instance: u32) -> Result<(), StateError> {
        for device in order {
            let earlier = (device.name(), device.instance());
            if earlier == (name.to_owned(), instance) {
                break;
            }
            if !self.loaded.contains(&earlier) {
                return Err(StateError::Order { missing: format!("{} {}", earlier.0, earlier.1) });
            }
        }
        if self.loaded.contains(&(name.to_owned(), instance)) {
            return Err(StateError::Twice);
        }
        Ok(())
    }

    /// The first section that is missing.
    pub(crate) fn missing(&self, order: &[Arc<dyn Device>]) -> Option<String> {
        let name = |device: &Arc<dyn Device>| (device.name(), device.instance());
        order
            .iter()
            .map(name)
            .find(|key| !self.loaded.contains(key))
            .map(|key| format!("{} {}", key.0, key.1))
    }
}

/// Runs a device's load: order first, then the body; notes that it was loaded.
pub(crate) fn load(
    shared: &Arc<Shared>,
    device: &dyn Device,
    body: &[u8],
    apply: impl FnOnce(&mut codec::Fields<'_>) -> Result<(), StateError>,
) -> Result<(), VmError> {
    let (name, instance) = (device.name(), device.instance());
    let attempt = || {
        shared.loading().expect(&all(shared), &name, instance)?;
        let mut fields = codec::Fields::parse(body)?;
        apply(&mut fields)?;
        fields.finish()
    };
    attempt().map_err(|error| VmError::new(format!("loading {name} {instance}"), error))?;
    shared.loading().loaded.insert((name, instance));
    Ok(())
}

/// Names a failed save.
pub(crate) fn saving(device: &dyn Device, result: Result<Vec<u8>, StateError>) -> Result<Vec<u8>, VmError> {
    result.map_err(|error| VmError::new(format!("saving {} {}", device.name(), device.instance()), error))
}

/// At the destination, before prepare is answered: all of the state must have come.
pub(crate) struct Complete(pub(crate) Arc<Shared>);

impl Hook for Complete {
    fn name(&self) -> String {
        "machine state".into()
    }

    fn acquire(&self) -> Result<(), VmError> {
        match self.0.loading().missing(&all(&self.0)) {
            None => Ok(()),
            Some(section) => Err(VmError::new("machine state", format!("section {section} did not come"))),
        }
    }
}
