//! The machine's state as it moves, one module a device.
//!
//! Sections are saved and loaded in this order: `kvm-clock`, `serial`, `virtio/`, `vfio-user/` and
//! `vhost-user/` each from 0, `cpu` 0 to n−1, `irqchip`, `pit`.
//! A vCPU's LAPIC comes before the IOAPIC, whose loading may deliver an interrupt to it; the PIT comes
//! last, since it ticks from the moment it is loaded, guest or none. [`context::Loading`] refuses another order,
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

pub(crate) mod codec;

mod clock;
mod compat;
mod context;
mod cpu;
mod external_process;
mod irqchip;
mod msrs;
mod pit;
mod realtime;
mod serial;
mod tsc;
pub(crate) mod virtio;

use std::sync::Arc;

use sterna::{Device, Hook, VmError};

use crate::hardware::Hardware;
use crate::vcpus::Vcpus;
use context::Context;
pub(crate) use msrs::known as known_msrs;

/// The saved state of one machine.
pub(crate) struct Devices {
    context: Arc<Context>,
    /// In save order.
    all: Vec<Arc<dyn Device>>,
}

impl Devices {
    pub(crate) fn new(hardware: Arc<Hardware>, vcpus: Arc<Vcpus>) -> Self {
        let context = Arc::new(Context::new(hardware, vcpus));
        let all = all(&context);
        context.loading().expect_all(&all);
        Self { context, all }
    }

    /// All devices, in save order.
    pub(crate) fn all(&self) -> &[Arc<dyn Device>] {
        &self.all
    }

    /// The record that both sides must agree on.
    pub(crate) fn compatibility(&self) -> Arc<dyn Device> {
        Arc::new(compat::Compatibility(Arc::clone(&self.context)))
    }

    /// Every device's state, in save order.
    pub(crate) fn save(&self) -> Result<Vec<Vec<u8>>, VmError> {
        self.all.iter().map(|device| device.save()).collect()
    }

    /// Every device gets its state of `bodies`, in save order, whatever was loaded before.
    pub(crate) fn reset(&self, bodies: &[Vec<u8>]) {
        self.context.loading().expect_all(&self.all);
        for (device, body) in self.all.iter().zip(bodies) {
            if let Err(error) = device.load(device.version(), body) {
                // The next load replaces every bit of it, and no guest starts without one.
                tracing::error!(%error, "a device could not be reset");
            }
        }
        self.context.loading().expect_all(&self.all);
    }

    /// The first section that was not loaded.
    pub(crate) fn missing(&self) -> Option<String> {
        self.context.loading().missing()
    }

    /// At the destination, before prepare is answered: all of the state must have come.
    pub(crate) fn complete(&self) -> Arc<dyn Hook> {
        Arc::new(Complete(Arc::clone(&self.context)))
    }
}

fn all(context: &Arc<Context>) -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> = vec![
        Arc::new(clock::KvmClock(Arc::clone(context))),
        Arc::new(serial::SerialConsole(Arc::clone(context))),
    ];
    devices.extend(virtio::all(context));
    devices.extend(external_process::all(context));
    for index in 0..context.vcpus.count() {
        devices.push(Arc::new(cpu::Cpu { context: Arc::clone(context), index }));
    }
    devices.push(Arc::new(irqchip::Irqchip(Arc::clone(context))));
    devices.push(Arc::new(pit::Pit(Arc::clone(context))));
    devices
}

struct Complete(Arc<Context>);

impl Hook for Complete {
    fn name(&self) -> String {
        "machine state".into()
    }

    fn acquire(&self) -> Result<(), VmError> {
        match self.0.loading().missing() {
            None => Ok(()),
            Some(section) => Err(VmError::new("machine state", format!("section {section} did not come"))),
        }
    }

    /// It belongs to no host.
    fn seize(&self) -> Result<(), VmError> {
        self.acquire()
    }
}
