//! The machine as it runs.

mod boot;
mod build;
pub(crate) mod bus;
pub(crate) mod config;
mod cpuid;
mod engine;
pub(crate) mod gate;
mod throttle;
mod tracking;
mod vcpu;
pub(crate) mod vfio_user;
mod vhost_user;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VmFd;
use parking_lot::{Mutex, MutexGuard};
use sterna_devices::vhost_user::VhostUserDevice;
use sterna_ram::GuestRam;
use sterna_ram::dirty::KvmDirtyRing;

use crate::devices::{self, Loading};
use crate::layout::Range;
use crate::{EndReason, MachineConfig, VmmError};
use bus::Bus;
use gate::{Gate, Wanted};
use throttle::Throttling;
use tracking::Tracking;
use vcpu::Vcpu;
use vfio_user::VfioUser;

/// The machine type's name in the stream's configuration section (specs/stream.md §1.2).
pub const MACHINE_TYPE: &str = "sterna-1";

/// A virtual machine on `/dev/kvm`.
///
/// Dropping it ends its vCPU threads and closes its descriptors, once the devices that
/// [`KvmMachine::devices`] gave out are dropped too.
pub struct KvmMachine {
    name: String,
    uuid: Option<[u8; 16]>,
    shared: Arc<Shared>,
    devices: Vec<Arc<dyn sterna::Device>>,
    compatibility: Arc<dyn sterna::Device>,
    /// The state of a machine that has no guest yet, to go back to after a failed load.
    pristine: Option<Vec<Vec<u8>>>,
    has_guest: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// One stop, resume or quit at a time.
    operation: Mutex<()>,
}

/// What vCPU threads and devices share.
pub(crate) struct Shared {
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) gate: Gate,
    pub(crate) bus: Bus,
    pub(crate) caps: Caps,
    pub(crate) tsc_khz: u32,
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    /// MSRs that this kernel knows and that are the guest's state.
    pub(crate) msrs: Vec<u32>,
    pub(crate) run_bytes: usize,
    pub(crate) ranges: Vec<Range>,
    pub(crate) loading: Mutex<Loading>,
    pub(crate) throttling: Throttling,
    /// Before `vm`: the rings are memory of its vCPUs.
    pub(crate) tracking: Tracking,
    pub(crate) vfio_user: Vec<VfioUser>,
    pub(crate) vhost_user: Vec<Arc<VhostUserDevice>>,
    pub(crate) vm: Arc<VmFd>,
    /// After `vm`: the kernel uses the memory for as long as the VM lives.
    pub(crate) ram: GuestRam,
}

/// What the kernel offers beyond the least that the machine needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caps {
    pub(crate) sregs2: bool,
    /// Bytes of the xsave area, 0 without KVM_CAP_XSAVE2.
    pub(crate) xsave2_bytes: usize,
    pub(crate) xsave: bool,
    pub(crate) xcrs: bool,
    pub(crate) debugregs: bool,
    pub(crate) clock_flags: u32,
    pub(crate) tsc_control: bool,
    pub(crate) gib_pages: bool,
}

impl KvmMachine {
    /// Builds the machine. With a guest it is ready and stopped ([`KvmMachine::resume`] starts it);
    /// `incoming` it waits for a migration.
    ///
    /// SIGRTMIN becomes the signal that calls vCPUs out of the guest: the embedder must not use it.
    ///
    /// # Errors
    /// [`VmmError::Config`] if the configuration cannot be built, [`VmmError::Kvm`] if the kernel refuses
    /// (no `/dev/kvm`, no right to it), [`VmmError::Ram`] if RAM cannot be mapped.
    pub fn new(config: MachineConfig) -> Result<Arc<Self>, VmmError> {
        config.check()?;
        let mut config = config;
        let shared = Arc::new(build::shared(&mut config)?);
        let MachineConfig { name, uuid, vcpus, guest, incoming, .. } = config;
        let mut machine = Self {
            name,
            uuid,
            devices: devices::all(&shared),
            compatibility: devices::compatibility(&shared),
            pristine: None,
            has_guest: AtomicBool::new(!incoming),
            threads: Mutex::default(),
            operation: Mutex::default(),
            shared,
        };
        if incoming {
            machine.pristine = Some(machine.snapshot()?);
        } else if let Some(image) = &guest {
            boot::load(&machine.shared, image)?;
        }
        for index in 0..usize::from(vcpus) {
            let thread = vcpu::spawn(&machine.shared, index)
                .map_err(|source| VmmError::Thread { of: format!("vcpu {index}"), source })?;
            machine.threads().push(thread);
        }
        let thread = throttle::spawn(&machine.shared)
            .map_err(|source| VmmError::Thread { of: "the throttle".into(), source })?;
        machine.threads().push(thread);
        Ok(Arc::new(machine))
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The guest's RAM.
    pub fn ram(&self) -> &GuestRam {
        &self.shared.ram
    }

    /// How RAM lies in guest-physical memory.
    pub fn ranges(&self) -> &[Range] {
        &self.shared.ranges
    }

    /// The dirty rings, if the machine was made with them.
    pub fn dirty_ring(&self) -> Option<&KvmDirtyRing> {
        self.shared.tracking.ring()
    }

    /// The devices whose state moves, in save order.
    pub fn devices(&self) -> Vec<Arc<dyn sterna::Device>> {
        self.devices.clone()
    }

    /// The record that must be equal on both sides.
    pub fn compatibility(&self) -> Arc<dyn sterna::Device> {
        Arc::clone(&self.compatibility)
    }

    /// False while the machine waits for a migration.
    pub fn has_guest(&self) -> bool {
        self.has_guest.load(Ordering::Acquire)
    }

    /// Whether the guest runs now.
    pub fn is_running(&self) -> bool {
        self.shared.gate.running()
    }

    /// Why the guest ended, if it did.
    pub fn ended(&self) -> Option<EndReason> {
        self.shared.gate.lock().ended.clone()
    }

    /// Waits until the guest has ended by itself and every vCPU is out of it; None if it has not within `limit`.
    pub fn wait_ended(&self, limit: Duration) -> Option<EndReason> {
        self.shared.gate.wait_ended(limit)
    }

    /// Stops the guest: on return every vCPU is out of it with its pending I/O completed. Idempotent.
    pub fn stop(&self) {
        let _one = self.operation();
        self.shared.park_and_wait();
    }

    /// Starts the guest, or lets it run on. Idempotent. A device in another process that cannot run is logged, and
    /// the guest runs without it.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no guest, or it has ended.
    pub fn resume(&self) -> Result<(), VmmError> {
        self.let_run(true)
    }

    /// As [`KvmMachine::resume`]; its devices may be another's to run.
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
            // Its devices run too, or are being saved: to run them would end that.
            return Ok(());
        }
        if with_devices {
            self.shared.run_devices(&self.name);
        }
        self.shared.tell_paused();
        self.shared.gate.want(Wanted::Run, || {});
        Ok(())
    }

    /// An operator's stop: the guest, then devices in other processes. It is logged if one does not.
    pub fn pause(&self) {
        let _one = self.operation();
        self.shared.park_and_wait();
        self.shared.stop_devices(&self.name);
    }

    /// An operator's resume.
    ///
    /// # Errors
    /// As [`KvmMachine::resume`].
    pub fn cont(&self) -> Result<(), VmmError> {
        self.resume()
    }

    /// Ends the machine's threads; the guest never runs again. Idempotent.
    pub fn quit(&self) {
        let _one = self.operation();
        self.shared.gate.want(Wanted::Quit, || self.shared.kick_all());
        self.shared.throttling.quit();
        for thread in self.threads().drain(..) {
            if thread.join().is_err() {
                tracing::error!(machine = self.name, "a thread panicked");
            }
        }
    }

    /// Every device's state, in the order of [`KvmMachine::devices`].
    fn snapshot(&self) -> Result<Vec<Vec<u8>>, VmmError> {
        let save = |device: &Arc<dyn sterna::Device>| {
            device.save().map_err(|error| VmmError::State {
                what: "saving the machine's first state",
                why: error.to_string(),
            })
        };
        self.devices.iter().map(save).collect()
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
            .field("vcpus", &self.shared.vcpus.len())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Closes the gate, calls every vCPU out and waits until it is.
    fn park_and_wait(&self) {
        self.gate.want(Wanted::Park, || self.kick_all());
        self.gate.wait_parked();
    }

    /// The guest ended by itself; called on a vCPU thread.
    fn end(&self, reason: EndReason) {
        self.gate.end(reason, || self.kick_all());
    }

    /// Call under the gate's lock.
    fn kick_all(&self) {
        self.vcpus.iter().for_each(Vcpu::kick);
    }

    /// Tells guests with a paravirtual clock that they were stopped, so that their watchdogs forgive it.
    pub(crate) fn tell_paused(&self) {
        for vcpu in &self.vcpus {
            // Refused (EINVAL) where the guest does not use the clock: nothing to tell then.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
    }

    pub(crate) fn loading(&self) -> MutexGuard<'_, Loading> {
        self.loading.lock()
    }
}
