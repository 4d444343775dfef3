//! The running machine and the calls of its operator.

mod boot;
mod build;
mod disks;
mod engine;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use sterna::VmError;
use sterna_devices::vfio_user::Client;
use sterna_devices::vhost_user::VhostUserDevice;
use sterna_ram::GuestRam;
use sterna_ram::dirty::KvmDirtyRing;
use sterna_standby::EpochGate;

use crate::config::MachineConfig;
use crate::devices::Devices;
use crate::end_reason::EndReason;
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::layout::Range;
use crate::vcpus::Vcpus;
use crate::vcpus::thread::{self, Runner};
use crate::vcpus::throttle::{self, Throttling};
use crate::vcpus::tracking::Tracking;
use build::Parts;

/// The machine type's name in the stream's configuration section (specs/stream.md §1.2).
pub const MACHINE_TYPE: &str = "sterna-1";

/// A virtual machine on `/dev/kvm`.
///
/// Dropping it ends its vCPU threads and closes its descriptors, after the devices that
/// [`KvmMachine::devices`] returned are dropped too.
pub struct KvmMachine {
    name: String,
    uuid: Option<[u8; 16]>,
    hardware: Arc<Hardware>,
    vcpus: Arc<Vcpus>,
    tracking: Arc<Tracking>,
    throttling: Arc<Throttling>,
    devices: Devices,
    /// The initial state of a machine without a guest. It is restored after a failed load.
    pristine: Option<Vec<Vec<u8>>>,
    has_guest: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Serialises stop, resume and quit.
    operation: Mutex<()>,
}

impl KvmMachine {
    /// Builds the machine. With a guest, the machine is ready and stopped until [`KvmMachine::resume`]. With
    /// `incoming`, it waits for a migration.
    ///
    /// SIGRTMIN becomes the signal that interrupts vCPUs in the guest. The embedder must not use this signal.
    ///
    /// # Errors
    /// [`VmmError::Config`] if the configuration cannot be built, [`VmmError::Kvm`] if the kernel refuses
    /// (no `/dev/kvm`, no right to it), [`VmmError::Ram`] if RAM cannot be mapped.
    pub fn new(config: MachineConfig) -> Result<Arc<Self>, VmmError> {
        config.check()?;
        let mut config = config;
        let Parts { hardware, vcpus, tracking, run_bytes } = build::parts(&mut config)?;
        let MachineConfig { name, uuid, guest, incoming, .. } = config;
        let mut machine = Self {
            name,
            uuid,
            devices: Devices::new(Arc::clone(&hardware), Arc::clone(&vcpus)),
            throttling: Arc::new(Throttling::new(Arc::clone(&vcpus), Arc::clone(&tracking))),
            pristine: None,
            has_guest: AtomicBool::new(!incoming),
            threads: Mutex::default(),
            operation: Mutex::default(),
            hardware,
            vcpus,
            tracking,
        };
        if incoming {
            let failed = |error: VmError| VmmError::State {
                what: "saving the machine's first state",
                why: error.to_string(),
            };
            machine.pristine = Some(machine.devices.save().map_err(failed)?);
        } else if let Some(image) = &guest {
            boot::load(&machine.hardware, &machine.vcpus, image)?;
        }
        machine.spawn_threads(run_bytes)?;
        Ok(Arc::new(machine))
    }

    /// The machine's name, from its configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The guest's RAM blocks.
    pub fn ram(&self) -> &GuestRam {
        self.hardware.vm.ram()
    }

    /// The guest-physical ranges of RAM.
    pub fn ranges(&self) -> &[Range] {
        self.hardware.vm.ranges()
    }

    /// The dirty rings, if the configuration asked for them.
    pub fn dirty_ring(&self) -> Option<&KvmDirtyRing> {
        self.tracking.ring()
    }

    /// The devices in other processes over vfio-user, in the order of [`crate::MachineConfig::vfio_user`].
    pub fn vfio_user(&self) -> Vec<Arc<Client>> {
        self.hardware.external.vfio_user.iter().map(|device| Arc::clone(&device.client)).collect()
    }

    /// The virtio devices in other processes, in the order of [`crate::MachineConfig::vhost_user`]. The
    /// caller can start their rings, kick them and wait for their notifications.
    pub fn vhost_user(&self) -> Vec<Arc<VhostUserDevice>> {
        self.hardware.external.vhost_user.clone()
    }

    /// The devices whose state moves, in save order.
    pub fn devices(&self) -> Vec<Arc<dyn sterna::Device>> {
        self.devices.all().to_vec()
    }

    /// The compatibility record, which must be equal on both sides.
    pub fn compatibility(&self) -> Arc<dyn sterna::Device> {
        self.devices.compatibility()
    }

    /// The gate for packets of the guest's network cards while a standby protects the guest. `None` without
    /// cards. Join it with the console's gate ([`sterna_standby::JoinedGate`]).
    pub fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        self.hardware.virtio.packet_gate()
    }

    /// Whether the machine has a guest. False while it waits for a migration.
    pub fn has_guest(&self) -> bool {
        self.has_guest.load(Ordering::Acquire)
    }

    /// Whether the guest runs now.
    pub fn is_running(&self) -> bool {
        self.vcpus.is_running()
    }

    /// Why the guest ended; `None` if it has not.
    pub fn ended(&self) -> Option<EndReason> {
        self.vcpus.ended()
    }

    /// Waits until the guest has ended and every vCPU is parked. None after `limit`.
    pub fn wait_ended(&self, limit: Duration) -> Option<EndReason> {
        self.vcpus.wait_ended(limit)
    }

    /// Types `bytes` into the serial console and returns how many the guest's UART took. It takes none while
    /// the guest does not run here, and no more than its buffer has room for.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        let _one = self.operation();
        if self.is_running() { self.hardware.bus.type_in(bytes) } else { 0 }
    }

    /// Stops the guest. On return every vCPU has left the guest with its pending I/O completed, and the
    /// virtio devices have finished their requests. Idempotent.
    pub fn stop(&self) {
        let _one = self.operation();
        self.stand_still();
    }

    /// Starts or resumes the guest. Idempotent. If a device in another process cannot run, the failure is
    /// logged, and the guest runs without the device.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no guest, or the guest has ended.
    pub fn resume(&self) -> Result<(), VmmError> {
        self.let_run(true)
    }

    /// Like [`KvmMachine::resume`]. Without `with_devices`, the caller runs the devices in other processes.
    fn let_run(&self, with_devices: bool) -> Result<(), VmmError> {
        let _one = self.operation();
        if !self.has_guest() {
            return Err(VmmError::State {
                what: "cont",
                why: "the machine waits for an incoming migration".into(),
            });
        }
        if let Some(reason) = self.ended() {
            return Err(VmmError::State { what: "cont", why: format!("the guest has ended: {reason}") });
        }
        if self.is_running() {
            // The devices already run, or are being saved; starting them again would end the save.
            return Ok(());
        }
        if with_devices {
            self.hardware.external.run(&self.name);
        }
        self.run();
        Ok(())
    }

    /// Starts the devices in this process, then the vCPUs.
    fn run(&self) {
        self.hardware.virtio.run();
        self.vcpus.run();
    }

    /// Stops all writers of guest memory, except devices in other processes.
    fn stand_still(&self) {
        self.vcpus.park_and_wait();
        self.hardware.virtio.pause();
    }

    /// Pauses the guest, then its devices in other processes. A device that does not stop is logged.
    pub fn pause(&self) {
        let _one = self.operation();
        self.stand_still();
        self.hardware.external.stop(&self.name);
    }

    /// Resumes the guest after [`KvmMachine::pause`].
    ///
    /// # Errors
    /// The same as for [`KvmMachine::resume`].
    pub fn cont(&self) -> Result<(), VmmError> {
        self.resume()
    }

    /// Thread ids of the vCPUs (`gettid(2)`), in the vCPUs' order.
    pub fn vcpu_threads(&self) -> Vec<i32> {
        self.vcpus.thread_ids()
    }

    /// Ends the machine's threads. The guest cannot run afterwards. Idempotent.
    pub fn quit(&self) {
        let _one = self.operation();
        self.vcpus.quit();
        self.throttling.quit();
        for thread in self.threads().drain(..) {
            if thread.join().is_err() {
                tracing::error!(machine = self.name, "a thread panicked");
            }
        }
        self.hardware.virtio.pause();
    }

    fn spawn_threads(&self, run_bytes: usize) -> Result<(), VmmError> {
        let runner = Arc::new(Runner {
            vcpus: Arc::clone(&self.vcpus),
            tracking: Arc::clone(&self.tracking),
            throttling: Arc::clone(&self.throttling),
            bus: Arc::clone(&self.hardware.bus),
            run_bytes,
        });
        let failed = |of: String| move |source| VmmError::Thread { of, source };
        for index in 0..self.vcpus.count() {
            let thread = thread::spawn(&runner, index).map_err(failed(format!("vcpu {index}")))?;
            self.threads().push(thread);
        }
        let thread = throttle::spawn(&self.throttling).map_err(failed("the throttle".into()))?;
        self.threads().push(thread);
        Ok(())
    }

    fn operation(&self) -> MutexGuard<'_, ()> {
        self.operation.lock()
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock()
    }
}

impl Drop for KvmMachine {
    fn drop(&mut self) {
        self.quit();
    }
}

impl std::fmt::Debug for KvmMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvmMachine")
            .field("name", &self.name)
            .field("vcpus", &self.vcpus.count())
            .finish_non_exhaustive()
    }
}
