//! The VM in KVM: its descriptor, its slots with guest RAM, and the kernel's chips.

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VmFd};
use sterna_ram::dirty::{KvmSlot, LoggedRange};
use sterna_ram::{GuestRam, RamBlock, RamError};

use super::memory::{DeviceMemory, VmRam};
use crate::error::VmmError;
use crate::layout::{self, Range};

/// A VM and the RAM that its slots use. Every owner of a descriptor of the VM (a vCPU, an interrupt line)
/// shares this value. RAM therefore stays mapped until the kernel has closed the VM.
pub(crate) struct KvmVm {
    fd: VmFd,
    /// Declared after `fd`, so that the VM is closed first.
    ram: Arc<VmRam>,
}

/// Allocates a RAM block with this name and length in bytes.
pub(crate) type MakeBlock<'a> = &'a dyn Fn(&str, u64) -> Result<RamBlock, RamError>;

impl KvmVm {
    /// Creates a VM with RAM, the interrupt controllers and the timer, but without vCPUs.
    pub(crate) fn new(kvm: &Kvm, ram_bytes: u64, make: MakeBlock<'_>) -> Result<Self, VmmError> {
        let fd = kvm.create_vm().map_err(|error| VmmError::kvm("KVM_CREATE_VM", "/dev/kvm", error))?;
        let ranges = layout::ranges(ram_bytes);
        let ram = Arc::new(VmRam::new(make_ram(&ranges, make)?, ranges)?);
        let vm = Self { fd, ram };
        vm.map_ram()?;
        vm.make_chips(kvm)?;
        Ok(vm)
    }

    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// The guest's RAM blocks.
    pub(crate) fn ram(&self) -> &GuestRam {
        self.ram.ram()
    }

    /// The same RAM, shared with devices for their lifetime.
    pub(crate) fn shared_ram(&self) -> &Arc<VmRam> {
        &self.ram
    }

    /// RAM for devices that write it. The view records their writes.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        self.ram.memory()
    }

    /// The guest-physical ranges of RAM.
    pub(crate) fn ranges(&self) -> &[Range] {
        self.ram.ranges()
    }

    /// The KVM slots of RAM: range N is in slot N.
    pub(crate) fn slots(&self) -> Vec<KvmSlot> {
        let slot = |(slot, range): (u32, &Range)| KvmSlot {
            slot,
            flags: 0,
            guest_address: range.start,
            block: range.block,
            first_page: 0,
            pages: self.ram().block(range.block).pages(),
        };
        (0..).zip(self.ranges()).map(slot).collect()
    }

    /// The ranges of RAM for dirty logs that use guest-physical addresses.
    pub(crate) fn logged_ranges(&self) -> Vec<LoggedRange> {
        let range = |range: &Range| LoggedRange {
            guest_address: range.start,
            block: range.block,
            first_page: 0,
            pages: self.ram().block(range.block).pages(),
        };
        self.ranges().iter().map(range).collect()
    }

    fn map_ram(&self) -> Result<(), VmmError> {
        for (slot, range) in (0u32..).zip(self.ranges()) {
            let block = self.ram().block(range.block);
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: range.start,
                memory_size: range.len_bytes,
                userspace_addr: block.host_address() as u64,
            };
            // SAFETY: the range is one block's whole mapping. Every owner of a descriptor of the VM keeps
            // `self` and so the mapping.
            unsafe { self.fd.set_user_memory_region(region) }
                .map_err(|error| VmmError::kvm("KVM_SET_USER_MEMORY_REGION", block.name(), error))?;
        }
        Ok(())
    }

    fn make_chips(&self, kvm: &Kvm) -> Result<(), VmmError> {
        let vm = &self.fd;
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
}

fn make_ram(ranges: &[Range], make: MakeBlock<'_>) -> Result<GuestRam, RamError> {
    let names = [layout::LOW_BLOCK, layout::HIGH_BLOCK];
    let blocks: Result<Vec<_>, _> = ranges
        .iter()
        .map(|range| {
            let block = make(names[range.block], range.len_bytes)?;
            Ok::<_, RamError>(block.at_guest_address(range.start))
        })
        .collect();
    GuestRam::new(blocks?)
}
