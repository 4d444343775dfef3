//! The transport of a device: the registers of virtio-mmio, version 2 (VIRTIO 1.2, section 4.2).

mod registers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_ioctls::IoEventAddress;
use parking_lot::Mutex;
use sterna::DeviceStream;
use sterna_devices::vhost_user::VhostUserDevice;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_QUEUE_NOTIFY};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::backend::Backend;
use super::block::control::DiskControl;
use super::interrupt::Interrupt;
use super::space::ConfigurationSpace;
use super::worker::{Parts, Signals, Worker};
use crate::error::VmmError;
use crate::hardware::memory::VmRam;
use crate::hardware::vm::KvmVm;
use crate::layout::{virtio_address, virtio_interrupt};

/// Features that every device of this machine offers.
const COMMON_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Properties of a device that do not depend on its driver.
pub(crate) struct Identity {
    /// Name for messages, such as `disk 0`.
    pub(crate) name: String,
    pub(crate) kind: u32,
    features: u64,
    pub(crate) queue_sizes: Vec<u16>,
    /// The initial configuration space.
    pub(crate) configuration: Vec<u8>,
    /// Large state that is sent in addition to the device's section: a copied disk.
    pub(crate) stream: Option<Arc<dyn DeviceStream>>,
    /// The disk, if the device is one.
    pub(crate) disk: Option<Arc<DiskControl>>,
    /// The other process that serves the queues, if there is one.
    pub(crate) process: Option<Arc<VhostUserDevice>>,
}

impl Identity {
    /// Features that the driver may choose.
    pub(crate) fn features(&self) -> u64 {
        // The process may be handed over with the guest, so its features are not fixed.
        self.process.as_ref().map_or(self.features, |process| process.offered_features())
    }
}

/// A virtio device in its slot.
pub(crate) struct Transport {
    ram: Arc<VmRam>,
    pub(crate) identity: Identity,
    pub(super) signals: Arc<Signals>,
    pub(super) parts: Arc<Mutex<Parts>>,
    pub(super) registers: Mutex<Registers>,
}

/// Registers that the driver has set, except the queues'.
#[derive(Default)]
pub(super) struct Registers {
    pub(super) device_features_select: u32,
    pub(super) driver_features_select: u32,
    pub(super) driver_features: u64,
    pub(super) queue_select: u32,
    worker: Option<Worker>,
}

impl Transport {
    /// A device that uses this RAM. Until it is [connected](Self::connect), its interrupts reach no guest,
    /// and kicks arrive only through its registers.
    pub(super) fn new(ram: &Arc<VmRam>, name: String, backend: Box<dyn Backend>) -> Result<Self, VmmError> {
        let failed = |source| VmmError::Kvm { call: "eventfd", on: name.clone(), source };
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(failed);
        let process = backend.process();
        let common = if process.is_none() { COMMON_FEATURES } else { 0 };
        let identity = Identity {
            kind: backend.kind(),
            features: backend.features() | common,
            queue_sizes: backend.queue_sizes(),
            configuration: backend.configuration(),
            stream: backend.stream(),
            disk: backend.disk(),
            process,
            name: name.clone(),
        };
        let kick = |queue| {
            let theirs = identity.process.as_ref().and_then(|process| process.kick(queue));
            theirs.map_or_else(event, |kick| kick.try_clone().map_err(failed))
        };
        let kicks = (0..identity.queue_sizes.len()).map(kick).collect::<Result<_, _>>()?;
        let queues = identity.queue_sizes.iter().map(|size| Queue::new(*size)).collect::<Result<_, _>>();
        let queues = queues.map_err(|error| VmmError::Config {
            what: "virtio",
            why: format!("{name}: its queues: {error}"),
        })?;
        let signals = Signals {
            status: AtomicU32::new(0),
            interrupt: Interrupt::new(event()?),
            space: ConfigurationSpace::new(identity.configuration.clone()),
            failures: AtomicU32::new(0),
            kicks,
        };
        Ok(Self {
            ram: Arc::clone(ram),
            identity,
            signals: Arc::new(signals),
            parts: Arc::new(Mutex::new(Parts { backend, queues })),
            registers: Mutex::default(),
        })
    }

    /// Connects the device to slot `slot` of the machine: KVM forwards interrupts and kicks.
    pub(super) fn connect(&self, vm: &KvmVm, slot: usize) -> Result<(), VmmError> {
        let refused = |call| {
            let on = self.identity.name.clone();
            move |error| VmmError::kvm(call, on, error)
        };
        let line = self.signals.interrupt.line();
        vm.fd().register_irqfd(line, virtio_interrupt(slot)).map_err(refused("KVM_IRQFD"))?;
        let notify = IoEventAddress::Mmio(virtio_address(slot) + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY));
        for (queue, kick) in (0u32..).zip(&self.signals.kicks) {
            vm.fd().register_ioevent(kick, &notify, queue).map_err(refused("KVM_IOEVENTFD"))?;
        }
        Ok(())
    }

    /// Starts the device before the guest runs, if its driver is ready.
    pub(super) fn run(&self) {
        let mut registers = self.registers.lock();
        let status = self.signals.status.load(Ordering::SeqCst);
        if !is_at_work(status) || registers.worker.is_some() {
            return;
        }
        self.signals.interrupt.raise_again();
        if status & VIRTIO_CONFIG_S_NEEDS_RESET == 0 {
            self.start(&mut registers);
        }
    }

    /// Stops the device after the guest was paused. On return no request is in flight.
    pub(super) fn pause(&self) {
        self.stop(&mut self.registers.lock());
    }

    /// Features that the driver has chosen.
    pub(super) fn driver_features(&self) -> u64 {
        self.registers.lock().driver_features
    }

    /// Changes the configuration space and notifies the driver.
    pub(super) fn change_configuration(&self, change: impl FnOnce(&mut [u8])) {
        self.signals.space.change(change);
        self.signals.interrupt.raise(VIRTIO_MMIO_INT_CONFIG);
    }

    fn start(&self, registers: &mut Registers) {
        let (name, features) = (&self.identity.name, registers.driver_features);
        let uses_event_index = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        self.parts.lock().queues.iter_mut().for_each(|queue| queue.set_event_idx(uses_event_index));
        match Worker::spawn(name, &self.ram, &self.signals, &self.parts, features) {
            Ok(worker) => registers.worker = Some(worker),
            Err(error) => {
                tracing::error!(device = name, %error, "the device has no thread");
                self.signals.needs_reset();
            }
        }
    }

    fn stop(&self, registers: &mut Registers) {
        if let Some(worker) = registers.worker.take() {
            worker.stop(&self.identity.name, &self.signals);
        }
    }

    fn reset(&self, registers: &mut Registers) {
        self.stop(registers);
        if let Some(process) = &self.identity.process
            && let Err(error) = process.reset()
            // A process that has ended was logged before, and a guest can trigger this without limit.
            && process.check_alive().is_ok()
        {
            tracing::warn!(device = self.identity.name, %error, "the device's process was not reset");
        }
        *registers = Registers::default();
        let mut parts = self.parts.lock();
        parts.queues.iter_mut().for_each(QueueT::reset);
        parts.backend.reset();
        self.signals.interrupt.set_causes(0);
        self.signals.status.store(0, Ordering::SeqCst);
    }
}

/// Whether a device with this status works: features are negotiated, and the driver is ready. A device that
/// needs a reset does not work either.
fn is_at_work(status: u32) -> bool {
    let both = VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
    status & both == both
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.pause();
    }
}

#[cfg(test)]
mod tests;
