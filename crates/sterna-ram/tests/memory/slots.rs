//! Memory slots of a KVM virtual machine, for the tests of its dirty logs.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use sterna_ram::dirty::KvmSlot;
use sterna_ram::{GuestRam, PAGE_SIZE};

const PAGE: u64 = PAGE_SIZE as u64;

pub fn slot(slot: u32, guest_page: u64, block: usize, first_page: u64, pages: u64) -> KvmSlot {
    KvmSlot { slot, flags: 0, guest_address: guest_page * PAGE, block, first_page, pages }
}

/// Creates or moves a slot of the VM.
pub fn set_slot(vm: &VmFd, ram: &GuestRam, slot: &KvmSlot) {
    let region = kvm_userspace_memory_region {
        slot: slot.slot,
        flags: 0,
        guest_phys_addr: slot.guest_address,
        memory_size: slot.pages * PAGE,
        userspace_addr: ram.block(slot.block).host_address() as u64 + slot.first_page * PAGE,
    };
    // SAFETY: each test's machine owns the RAM and the VM, and its vCPUs run only in the machine's methods.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
}
