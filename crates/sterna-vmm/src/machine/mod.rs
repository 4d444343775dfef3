//! The machine as it runs.

mod boot;
pub(crate) mod bus;
pub(crate) mod config;
mod cpuid;
mod engine;
pub(crate) mod gate;
mod vcpu;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::{
    KVM_PIT_SPEAKER_DUMMY, kvm_cpuid_entry2, kvm_enable_cap, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use sterna_ram::dirty::{KvmDirtyLog, KvmSlot};
use sterna_ram::{GuestRam, RamBlock};

use crate::devices::{self, Loading};
use crate::layout::{self, Range};
use crate::{EndReason, MachineConfig, VmmError, kvm};
use bus::Bus;
use gate::{Gate, Wanted};
use vcpu::Vcpu;

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
    dirty: KvmDirtyLog,
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
        let kvm = Kvm::new().map_err(|error| VmmError::kvm("open", "/dev/kvm", error))?;
        let vm =
            Arc::new(kvm.create_vm().map_err(|error| VmmError::kvm("KVM_CREATE_VM", "/dev/kvm", error))?);
        let (ram, ranges) = make_ram(&config)?;
        let slots = map_ram(&vm, &ram, &ranges)?;
        make_chips(&kvm, &vm)?;
        let log_fd = kvm::duplicate(vm.as_ref()).map_err(|source| VmmError::Kvm {
            call: "dup",
            on: "vm".into(),
            source,
        })?;
        let dirty = KvmDirtyLog::new(log_fd, slots, ram.clone())?;
        let MachineConfig { name, uuid, vcpus, guest, incoming, serial, ports, .. } = config;
        let bus = Bus::new(Arc::clone(&vm), serial, ports);
        let shared = Arc::new(make_shared(&kvm, vm, ram, ranges, bus, usize::from(vcpus))?);
        let mut machine = Self {
            name,
            uuid,
            dirty,
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
                .map_err(|source| VmmError::Thread { vcpu: index, source })?;
            machine.threads().push(thread);
        }
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
        self.shared.park();
        self.shared.gate.wait_parked();
    }

    /// Starts the guest, or lets it run on. Idempotent.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no guest, or it has ended.
    pub fn resume(&self) -> Result<(), VmmError> {
        let _one = self.operation();
        if !self.has_guest() {
            return Err(VmmError::State {
                what: "cont",
                why: "the machine waits for a migration to bring its guest".into(),
            });
        }
        if let Some(reason) = self.ended() {
            return Err(VmmError::State { what: "cont", why: format!("the guest has ended: {reason}") });
        }
        if !self.is_running() {
            self.shared.tell_paused();
        }
        self.shared.gate.want(Wanted::Run, || {});
        Ok(())
    }

    /// An operator's stop.
    pub fn pause(&self) {
        self.stop();
    }

    /// An operator's resume.
    ///
    /// # Errors
    /// As [`KvmMachine::resume`].
    pub fn cont(&self) -> Result<(), VmmError> {
        self.resume()
    }

    /// Ends the vCPU threads; the guest never runs again. Idempotent.
    pub fn quit(&self) {
        let _one = self.operation();
        self.shared.gate.want(Wanted::Quit, || self.shared.kick_all());
        for thread in self.threads().drain(..) {
            if thread.join().is_err() {
                tracing::error!(machine = self.name, "a vCPU thread panicked");
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
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Closes the gate and calls every vCPU out.
    fn park(&self) {
        self.gate.want(Wanted::Park, || self.kick_all());
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
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn make_ram(config: &MachineConfig) -> Result<(GuestRam, Vec<Range>), VmmError> {
    let ranges = layout::ranges(config.ram_bytes);
    let names = [layout::LOW_BLOCK, layout::HIGH_BLOCK];
    let blocks: Result<Vec<_>, _> = ranges
        .iter()
        .map(|range| RamBlock::new(names[range.block], range.len_bytes, config.backing))
        .collect();
    Ok((GuestRam::new(blocks?)?, ranges))
}

fn map_ram(vm: &VmFd, ram: &GuestRam, ranges: &[Range]) -> Result<Vec<KvmSlot>, VmmError> {
    let mut slots = Vec::new();
    for (slot, range) in (0u32..).zip(ranges) {
        let block = ram.block(range.block);
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: range.start,
            memory_size: range.len_bytes,
            userspace_addr: block.host_address() as u64,
        };
        // SAFETY: the range is one block's whole mapping, which `Shared` keeps until after the VM is closed.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| VmmError::kvm("KVM_SET_USER_MEMORY_REGION", block.name(), error))?;
        slots.push(KvmSlot {
            slot,
            flags: 0,
            guest_address: range.start,
            block: range.block,
            first_page: 0,
            pages: block.pages(),
        });
    }
    Ok(slots)
}

fn make_chips(kvm: &Kvm, vm: &VmFd) -> Result<(), VmmError> {
    if kvm.check_extension(Cap::SetTssAddr) {
        vm.set_tss_address(layout::TSS_ADDRESS)
            .map_err(|error| VmmError::kvm("KVM_SET_TSS_ADDR", "vm", error))?;
    }
    if kvm.check_extension(Cap::SetIdentityMapAddr) {
        vm.set_identity_map_address(layout::IDENTITY_MAP_ADDRESS)
            .map_err(|error| VmmError::kvm("KVM_SET_IDENTITY_MAP_ADDR", "vm", error))?;
    }
    for cap in [kvm_bindings::KVM_CAP_EXCEPTION_PAYLOAD, kvm_bindings::KVM_CAP_X86_TRIPLE_FAULT_EVENT] {
        if vm.check_extension_raw(cap.into()) > 0 {
            let enable = kvm_enable_cap { cap, args: [1, 0, 0, 0], ..Default::default() };
            vm.enable_cap(&enable).map_err(|error| VmmError::kvm("KVM_ENABLE_CAP", "vm", error))?;
        }
    }
    vm.create_irq_chip().map_err(|error| VmmError::kvm("KVM_CREATE_IRQCHIP", "vm", error))?;
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })
        .map_err(|error| VmmError::kvm("KVM_CREATE_PIT2", "vm", error))
}

fn make_shared(
    kvm: &Kvm,
    vm: Arc<VmFd>,
    ram: GuestRam,
    ranges: Vec<Range>,
    bus: Bus,
    vcpus: usize,
) -> Result<Shared, VmmError> {
    let cpuid = cpuid::template(kvm, vcpus)?;
    let mut fds = Vec::new();
    for index in 0..vcpus {
        let fd = vm
            .create_vcpu(index as u64)
            .map_err(|error| VmmError::kvm("KVM_CREATE_VCPU", format!("vcpu {index}"), error))?;
        cpuid::set(&fd, &cpuid, index)?;
        fds.push(fd);
    }
    let tsc_khz = fds[0].get_tsc_khz().map_err(|error| VmmError::kvm("KVM_GET_TSC_KHZ", "vcpu 0", error))?;
    let listed = kvm
        .get_msr_index_list()
        .map_err(|error| VmmError::kvm("KVM_GET_MSR_INDEX_LIST", "/dev/kvm", error))?;
    let msrs = devices::known_msrs(&fds[0], listed.as_slice());
    let caps = Caps {
        sregs2: kvm::get_sregs2(&fds[0]).is_ok(),
        xsave2_bytes: vm.check_extension_int(Cap::Xsave2).try_into().unwrap_or(0),
        xsave: kvm.check_extension(Cap::Xsave),
        xcrs: kvm.check_extension(Cap::Xcrs),
        debugregs: kvm.check_extension(Cap::Debugregs),
        clock_flags: vm.check_extension_int(Cap::AdjustClock).try_into().unwrap_or(0),
        tsc_control: kvm.check_extension(Cap::TscControl),
        gib_pages: cpuid.iter().any(|entry| entry.function == 0x8000_0001 && entry.edx & 1 << 26 != 0),
    };
    let run_bytes = vm.run_size();
    let vcpus = fds.into_iter().enumerate().map(|(index, fd)| Vcpu::new(index, fd)).collect();
    let (gate, loading) = (Gate::new(), Mutex::default());
    Ok(Shared { vcpus, gate, bus, caps, tsc_khz, cpuid, msrs, run_bytes, ranges, loading, vm, ram })
}
