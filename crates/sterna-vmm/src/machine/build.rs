//! Puts a machine together: the VM, its memory, chips and vCPUs, in the order that the kernel wants.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_PIT_SPEAKER_DUMMY, kvm_cpuid_entry2, kvm_enable_cap, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use parking_lot::Mutex;
use sterna_ram::dirty::{KvmDirtyLog, KvmDirtyRings, KvmSlot};
use sterna_ram::{GuestRam, RamBlock};

use super::bus::Bus;
use super::gate::Gate;
use super::throttle::Throttling;
use super::tracking::{Tracking, VcpuTracking};
use super::vcpu::Vcpu;
use super::{Caps, Shared, cpuid, vfio_user, vhost_user};
use crate::layout::{self, Range};
use crate::{MachineConfig, VmmError, devices, kvm};

/// All of the machine but its threads. Takes console and ports out of `config`.
pub(super) fn shared(config: &mut MachineConfig) -> Result<Shared, VmmError> {
    let kvm = Kvm::new().map_err(|error| VmmError::kvm("open", "/dev/kvm", error))?;
    let vm = Arc::new(kvm.create_vm().map_err(|error| VmmError::kvm("KVM_CREATE_VM", "/dev/kvm", error))?);
    let (ram, ranges) = make_ram(config)?;
    let slots = map_ram(&vm, &ram, &ranges)?;
    make_chips(&kvm, &vm)?;
    let cpuid = cpuid::template(&kvm, usize::from(config.vcpus))?;
    let log_fd = kvm::duplicate(vm.as_ref()).map_err(|source| VmmError::Kvm {
        call: "dup",
        on: "vm".into(),
        source,
    })?;
    // Rings come before vCPUs, and their mapping after.
    let (vcpu_tracking, fds) = match config.dirty_ring_size {
        None => {
            let fds = make_vcpus(&vm, &cpuid, config.vcpus)?;
            (VcpuTracking::Log(Arc::new(KvmDirtyLog::new(log_fd, slots, ram.clone())?)), fds)
        }
        Some(entries) => {
            let rings = KvmDirtyRings::enable(log_fd, entries)?;
            let fds = make_vcpus(&vm, &cpuid, config.vcpus)?;
            // SAFETY: `fds` keeps every descriptor open for the length of the call.
            let borrowed = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) });
            let ring = rings.source(&borrowed.collect::<Vec<_>>(), slots, ram.clone())?;
            (VcpuTracking::Ring(Arc::new(ring)), fds)
        }
    };
    let vfio_user = vfio_user::connect(&config.vfio_user, &ram, &ranges)?;
    let vhost_user = vhost_user::connect(&config.vhost_user, &ram, &ranges)?;
    let mut device_tracking = vfio_user::dirty_sources(&vfio_user, &ram, &ranges)?;
    device_tracking.extend(vhost_user::dirty_source(&vhost_user, &ram, &ranges)?);
    let tracking = Tracking::new(vcpu_tracking, device_tracking);
    let tsc_khz = fds[0].get_tsc_khz().map_err(|error| VmmError::kvm("KVM_GET_TSC_KHZ", "vcpu 0", error))?;
    let listed = kvm
        .get_msr_index_list()
        .map_err(|error| VmmError::kvm("KVM_GET_MSR_INDEX_LIST", "/dev/kvm", error))?;
    let msrs = devices::known_msrs(&fds[0], listed.as_slice());
    let caps = caps(&kvm, &vm, &fds[0], &cpuid);
    let run_bytes = vm.run_size();
    let serial = std::mem::replace(&mut config.serial, Box::new(io::sink()));
    let bus = Bus::new(Arc::clone(&vm), serial, std::mem::take(&mut config.ports));
    let vcpus: Vec<_> = fds.into_iter().enumerate().map(|(index, fd)| Vcpu::new(index, fd)).collect();
    let (gate, loading, throttling) = (Gate::new(), Mutex::default(), Throttling::new(vcpus.len()));
    Ok(Shared {
        vcpus,
        gate,
        bus,
        caps,
        tsc_khz,
        cpuid,
        msrs,
        run_bytes,
        ranges,
        loading,
        throttling,
        tracking,
        vfio_user,
        vhost_user,
        vm,
        ram,
    })
}

fn make_ram(config: &MachineConfig) -> Result<(GuestRam, Vec<Range>), VmmError> {
    let ranges = layout::ranges(config.ram_bytes);
    let names = [layout::LOW_BLOCK, layout::HIGH_BLOCK];
    let blocks: Result<Vec<_>, _> = ranges
        .iter()
        .map(|range| {
            let block = RamBlock::new(names[range.block], range.len_bytes, config.backing)?;
            Ok::<_, sterna_ram::RamError>(block.at_guest_address(range.start))
        })
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

fn make_vcpus(vm: &VmFd, cpuid: &[kvm_cpuid_entry2], count: u8) -> Result<Vec<VcpuFd>, VmmError> {
    let make = |index: usize| {
        let fd = vm
            .create_vcpu(index as u64)
            .map_err(|error| VmmError::kvm("KVM_CREATE_VCPU", format!("vcpu {index}"), error))?;
        cpuid::set(&fd, cpuid, index)?;
        Ok(fd)
    };
    (0..usize::from(count)).map(make).collect()
}

fn caps(kvm: &Kvm, vm: &VmFd, vcpu: &VcpuFd, cpuid: &[kvm_cpuid_entry2]) -> Caps {
    Caps {
        sregs2: kvm::get_sregs2(vcpu).is_ok(),
        xsave2_bytes: vm.check_extension_int(Cap::Xsave2).try_into().unwrap_or(0),
        xsave: kvm.check_extension(Cap::Xsave),
        xcrs: kvm.check_extension(Cap::Xcrs),
        debugregs: kvm.check_extension(Cap::Debugregs),
        clock_flags: vm.check_extension_int(Cap::AdjustClock).try_into().unwrap_or(0),
        tsc_control: kvm.check_extension(Cap::TscControl),
        gib_pages: cpuid.iter().any(|entry| entry.function == 0x8000_0001 && entry.edx & 1 << 26 != 0),
    }
}
