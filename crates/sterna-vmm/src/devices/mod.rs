//! The device state of a machine that migrates, one module per device.
//!
//! Sections are saved and loaded in this order: `kvm-clock`, `serial`, `virtio/`, `vfio-user/` and
//! `vhost-user/` each from 0, `cpu` 0 to n−1, `irqchip`, `pit`.
//! A vCPU's LAPIC comes before the IOAPIC, because loading the IOAPIC can deliver an interrupt to the LAPIC.
//! The PIT comes last, because it ticks as soon as it is loaded, even while no guest runs.
//! [`context::Loading`] refuses any other order. A machine that has not received all sections refuses to take
//! over the guest.
//!
//! # Bodies
//! A body is a list of fields ([`codec`]). The kernel's structures are sent unchanged: their layout is ABI,
//! little-endian, without padding.
//!
//! *Compatibility rule*: the section's version increases if a field is added that every reader must
//! understand, or if a field's meaning changes. A reader accepts versions from 1 to its own. It refuses
//! unknown fields, so no state is dropped silently.
//!
//! # Time
//! Guest time continues while the guest migrates. TSC, kvmclock and LAPIC deadlines continue as if the vCPUs
//! had only been stopped. A guest that reads its clocks before and after sees how long it was paused. The
//! elapsed time is measured with CLOCK_REALTIME on both sides. Between hosts it is therefore as accurate as
//! their NTP synchronisation. If the destination's clock is earlier than the source's, guest time stops
//! during the migration but never runs backwards.

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

/// The devices of one machine whose state is saved.
pub(crate) struct Devices {
    context: Arc<Context>,
    /// Devices in save order.
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

    /// The compatibility record, which both sides must agree on.
    pub(crate) fn compatibility(&self) -> Arc<dyn Device> {
        Arc::new(compat::Compatibility(Arc::clone(&self.context)))
    }

    /// Every device's state, in save order.
    pub(crate) fn save(&self) -> Result<Vec<Vec<u8>>, VmError> {
        self.all.iter().map(|device| device.save()).collect()
    }

    /// Loads `bodies` into all devices, in save order, regardless of earlier loads.
    pub(crate) fn reset(&self, bodies: &[Vec<u8>]) {
        self.context.loading().expect_all(&self.all);
        for (device, body) in self.all.iter().zip(bodies) {
            if let Err(error) = device.load(device.version(), body) {
                // The next load replaces the device's whole state, and no guest starts without a load.
                tracing::error!(%error, "a device could not be reset");
            }
        }
        self.context.loading().expect_all(&self.all);
    }

    /// The first section that was not loaded yet.
    pub(crate) fn missing(&self) -> Option<String> {
        self.context.loading().missing()
    }

    /// Hook of the destination: before prepare is answered, all sections must have been loaded.
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
            Some(section) => Err(VmError::new("machine state", format!("section {section} did not arrive"))),
        }
    }

    /// The check depends on no other host, so seizing is the same as acquiring.
    fn seize(&self) -> Result<(), VmError> {
        self.acquire()
    }
}
