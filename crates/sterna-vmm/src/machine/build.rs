//! Builds a machine's parts in the order that the kernel requires.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VcpuFd};
use sterna_ram::RamBlock;
use sterna_ram::dirty::{KvmDirtyLog, KvmDirtyRings};

use crate::config::MachineConfig;
use crate::devices;
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::hardware::bus::Bus;
use crate::hardware::caps::Caps;
use crate::hardware::console::Console;
use crate::hardware::cpuid;
use crate::hardware::external::ExternalDevices;
use crate::hardware::virtio::VirtioDevices;
use crate::hardware::vm::KvmVm;
use crate::kvm;
use crate::vcpus::Vcpus;
use crate::vcpus::tracking::{Tracking, VcpuTracking};

/// The parts of a machine before its threads are started.
pub(super) struct Parts {
    pub(super) hardware: Arc<Hardware>,
    pub(super) vcpus: Arc<Vcpus>,
    pub(super) tracking: Arc<Tracking>,
    /// Length of a vCPU's run structure, in bytes.
    pub(super) run_bytes: usize,
}

/// Builds the parts. Takes console and ports out of `config`.
pub(super) fn parts(config: &mut MachineConfig) -> Result<Parts, VmmError> {
    let kvm = Kvm::new().map_err(|error| VmmError::kvm("open", "/dev/kvm", error))?;
    let make = |name: &str, bytes| match config.incoming && config.takes_over {
        true => RamBlock::awaiting(name, bytes, config.backing),
        false => RamBlock::new(name, bytes, config.backing),
    };
    let vm = Arc::new(KvmVm::new(&kvm, config.ram_bytes, &make)?);
    let cpuid = cpuid::template(&kvm, usize::from(config.vcpus))?;
    let (vcpu_tracking, fds) = tracked_vcpus(config, &vm, &cpuid)?;
    let external = ExternalDevices::connect(config, &vm)?;
    let serial = std::mem::replace(&mut config.serial, Box::new(io::sink()));
    let console = Console::at_gate(serial, config.serial_gate.take());
    let virtio = VirtioDevices::new(config, vm.shared_ram(), &external.vhost_user, &console)?;
    virtio.connect(&vm)?;
    let virtio = Arc::new(virtio);
    let mut device_sources = external.dirty_sources(&vm)?;
    device_sources.extend(virtio.dirty_source(&vm)?);
    let tracking = Tracking::new(vcpu_tracking, device_sources);
    let tsc_khz = fds[0].get_tsc_khz().map_err(|error| VmmError::kvm("KVM_GET_TSC_KHZ", "vcpu 0", error))?;
    let listed = kvm
        .get_msr_index_list()
        .map_err(|error| VmmError::kvm("KVM_GET_MSR_INDEX_LIST", "/dev/kvm", error))?;
    let hardware = Hardware {
        bus: Arc::new(Bus::new(
            Arc::clone(&vm),
            console.clone(),
            Arc::clone(&virtio),
            std::mem::take(&mut config.ports),
        )),
        virtio,
        caps: Caps::of(&kvm, &vm, &fds[0], &cpuid),
        tsc_khz,
        cpuid,
        msrs: devices::known_msrs(&fds[0], listed.as_slice()),
        external,
        vm: Arc::clone(&vm),
    };
    let vcpus = Arc::new(Vcpus::new(fds, &vm));
    let sleepers = Arc::downgrade(&vcpus);
    console.when_room(move || {
        if let Some(vcpus) = sleepers.upgrade() {
            vcpus.wake_sleepers();
        }
    });
    Ok(Parts {
        hardware: Arc::new(hardware),
        vcpus,
        tracking: Arc::new(tracking),
        run_bytes: vm.fd().run_size(),
    })
}

/// Enables dirty rings before vCPUs are created, and maps the rings afterwards, as KVM requires.
fn tracked_vcpus(
    config: &MachineConfig,
    vm: &KvmVm,
    cpuid: &[kvm_cpuid_entry2],
) -> Result<(VcpuTracking, Vec<VcpuFd>), VmmError> {
    let log_fd =
        kvm::duplicate(vm.fd()).map_err(|source| VmmError::Kvm { call: "dup", on: "vm".into(), source })?;
    let Some(entries) = config.dirty_ring_size else {
        let log = KvmDirtyLog::new(log_fd, vm.slots(), vm.ram().clone())?;
        return Ok((VcpuTracking::Log(Arc::new(log)), make_vcpus(vm, cpuid, config.vcpus)?));
    };
    let rings = KvmDirtyRings::enable(log_fd, entries)?;
    let fds = make_vcpus(vm, cpuid, config.vcpus)?;
    // SAFETY: `fds` keeps every descriptor open for the length of the call.
    let borrowed = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) });
    let ring = rings.source(&borrowed.collect::<Vec<_>>(), vm.slots(), vm.ram().clone())?;
    Ok((VcpuTracking::Ring(Arc::new(ring)), fds))
}

fn make_vcpus(vm: &KvmVm, cpuid: &[kvm_cpuid_entry2], count: u8) -> Result<Vec<VcpuFd>, VmmError> {
    let make = |index: usize| {
        let fd = vm
            .fd()
            .create_vcpu(index as u64)
            .map_err(|error| VmmError::kvm("KVM_CREATE_VCPU", format!("vcpu {index}"), error))?;
        cpuid::set(&fd, cpuid, index)?;
        Ok(fd)
    };
    (0..usize::from(count)).map(make).collect()
}
