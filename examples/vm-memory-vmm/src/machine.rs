//! The machine: guest memory in two regions of one memfd, KVM's slots over them, a vCPU, a device.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

use crate::ticker::Ticker;
use crate::vcpu::Vcpu;

/// Guest memory below the hole at 640 KiB.
const LOW_BYTES: usize = 0xa_0000;
/// Where memory goes on after the hole, and where the guest counts.
const HIGH: GuestAddress = GuestAddress(1 << 20);
/// Where the guest's code is.
const CODE: GuestAddress = GuestAddress(0x1000);

/// Counts every word of 64 KiB up, sweep after sweep, prints each count, and halts at a word that has another value.
#[rustfmt::skip]
const GUEST: [u8; 23] = [
    0x66, 0x40,                                     // sweep:  inc eax
    0x66, 0xff, 0x05, 0x66, 0x39, 0x05, 0x75, 0x0a, // word:   inc dword ptr [di]; cmp [di], eax; jne broken
    0x83, 0xc7, 0x04, 0x75, 0xf3,                   //         add di, 4; jnz word
    0x66, 0xe7, 0x10, 0xeb, 0xec,                   //         out 0x10, eax; jmp sweep
    0xf4, 0xeb, 0xfd,                               // broken: hlt; jmp broken
];

/// The machine.
pub struct Machine {
    vcpu: Vcpu,
    ticker: Ticker,
    memory: GuestMemoryMmap<AtomicBitmap>,
    vm: VmFd,
}

impl Machine {
    /// A machine without a guest: [`Machine::boot`] or a migration brings one.
    pub fn new(memory_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let memory = map_memory(memory_bytes)?;
        let vm = Kvm::new()?.create_vm()?;
        vm.set_tss_address(0xfffb_d000)?; // Real mode on Intel needs three pages that are not memory.
        for (slot, region) in (0..).zip(memory.iter()) {
            let kvm_region = kvm_userspace_memory_region {
                slot,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.get_host_address(MemoryRegionAddress(0))? as u64,
                flags: 0,
            };
            // SAFETY: the slot is the region's whole mapping, which lives longer than the vCPU's last run: see `drop`.
            unsafe { vm.set_user_memory_region(kvm_region) }?;
        }
        let vcpu = Vcpu::new(vm.create_vcpu(0)?)?;
        vcpu.reset(CODE.0, HIGH.0)?;
        Ok(Self { vcpu, ticker: Ticker::default(), memory, vm })
    }

    /// Starts the guest from its beginning.
    pub fn boot(&self) -> Result<(), Box<dyn Error>> {
        self.memory.write_slice(&GUEST, CODE)?;
        self.resume();
        Ok(())
    }

    /// On return no vCPU runs and no device writes memory. Devices stop last: they complete what vCPUs asked for.
    pub fn pause(&self) {
        self.vcpu.pause();
        self.ticker.stop();
    }

    /// The guest runs.
    pub fn resume(&self) {
        self.ticker.start();
        self.vcpu.resume();
    }

    /// The vCPU.
    pub fn vcpu(&self) -> &Vcpu {
        &self.vcpu
    }

    /// The device.
    pub fn ticker(&self) -> &Ticker {
        &self.ticker
    }

    /// Guest memory. KVM's slot N is region N.
    pub fn memory(&self) -> &GuestMemoryMmap<AtomicBitmap> {
        &self.memory
    }

    /// The VM's descriptor, duplicated.
    pub fn duplicate_vm_fd(&self) -> io::Result<OwnedFd> {
        // SAFETY: `self.vm` keeps the descriptor open for longer than this borrow.
        unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }.try_clone_to_owned()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.pause();
    }
}

/// Two regions of one memfd, which shared memory with vhost-user processes would need, too.
fn map_memory(bytes: usize) -> Result<GuestMemoryMmap<AtomicBitmap>, Box<dyn Error>> {
    let high_bytes = bytes.checked_sub(LOW_BYTES).filter(|bytes| *bytes >= 64 << 10);
    let high_bytes = high_bytes.ok_or("the guest needs at least 1 MiB of memory")?;
    let file = File::from(memfd_create("guest-memory", MemfdFlags::CLOEXEC)?);
    file.set_len(bytes as u64)?;
    let file = Arc::new(file);
    let low = FileOffset::from_arc(file.clone(), 0);
    let high = FileOffset::from_arc(file, LOW_BYTES as u64);
    let ranges = [(GuestAddress(0), LOW_BYTES, Some(low)), (HIGH, high_bytes, Some(high))];
    Ok(GuestMemoryMmap::from_ranges_with_files(ranges)?)
}
