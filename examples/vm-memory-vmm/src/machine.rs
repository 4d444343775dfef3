//! The machine: guest memory in two regions of one memfd, the KVM slots for them, a vCPU, and a device.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress,
};

use crate::ticker::Ticker;
use crate::vcpu::Vcpu;

/// Size in bytes of guest memory below the hole at 640 KiB.
const LOW_BYTES: usize = 0xa_0000;
/// Start of guest memory after the hole, and of the words that the guest counts.
const HIGH: GuestAddress = GuestAddress(1 << 20);
/// Address of the guest's code.
const CODE: GuestAddress = GuestAddress(0x1000);

/// Alignment of plugged memory in bytes.
const PLUG_ALIGN: u64 = 2 << 20;

/// Guest memory; clones share the same mappings.
pub type Memory = GuestMemoryMmap<AtomicBitmap>;

/// Increments every word of 64 KiB, sweep after sweep, and prints each count.
///
/// Halts at a word with another value.
#[rustfmt::skip]
const GUEST: [u8; 23] = [
    0x66, 0x40,                                     // sweep:  inc eax
    0x66, 0xff, 0x05, 0x66, 0x39, 0x05, 0x75, 0x0a, // word:   inc dword ptr [di]; cmp [di], eax; jne broken
    0x83, 0xc7, 0x04, 0x75, 0xf3,                   //         add di, 4; jnz word
    0x66, 0xe7, 0x10, 0xeb, 0xec,                   //         out 0x10, eax; jmp sweep
    0xf4, 0xeb, 0xfd,                               // broken: hlt; jmp broken
];

/// A machine with one vCPU and one device.
pub struct Machine {
    vcpu: Vcpu,
    ticker: Ticker,
    memory: Mutex<Memory>,
    vm: VmFd,
}

impl Machine {
    /// A machine without a guest. [`Machine::boot`] starts one, or a migration delivers one.
    pub fn new(memory_bytes: usize) -> Result<Self, Box<dyn Error>> {
        Self::on(&Kvm::new()?, memory_bytes)
    }

    /// As [`Machine::new`], where `/dev/kvm` was opened before.
    pub fn on(kvm: &Kvm, memory_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let memory = map_memory(memory_bytes)?;
        let vm = kvm.create_vm()?;
        vm.set_tss_address(0xfffb_d000)?; // Real mode on Intel needs three pages that are not memory.
        for (slot, region) in (0..).zip(memory.iter()) {
            // SAFETY: the machine keeps the region, and the vCPU's last run is over before that is dropped: see `drop`.
            unsafe { set_slot(&vm, slot, region) }?;
        }
        let vcpu = Vcpu::new(vm.create_vcpu(0)?)?;
        vcpu.reset(CODE.0, HIGH.0)?;
        Ok(Self { vcpu, ticker: Ticker::default(), memory: Mutex::new(memory), vm })
    }

    /// Starts the guest at its first instruction.
    pub fn boot(&self) -> Result<(), Box<dyn Error>> {
        self.memory().write_slice(&GUEST, CODE)?;
        self.resume();
        Ok(())
    }

    /// On return no vCPU runs and no device writes memory. Devices stop last: they complete what vCPUs asked for.
    pub fn pause(&self) {
        self.vcpu.pause();
        self.ticker.stop();
    }

    /// Starts the device and the vCPU.
    pub fn resume(&self) {
        self.ticker.start();
        self.vcpu.resume();
    }

    /// The only vCPU of the machine.
    pub fn vcpu(&self) -> &Vcpu {
        &self.vcpu
    }

    /// The only device of the machine.
    pub fn ticker(&self) -> &Ticker {
        &self.ticker
    }

    /// Guest memory. KVM's slot N is region N.
    pub fn memory(&self) -> Memory {
        self.locked_memory().clone()
    }

    /// Maps memory after the present guest memory. The guest does not see it yet.
    pub fn map_more(&self, bytes: usize) -> Result<Arc<GuestRegionMmap<AtomicBitmap>>, Box<dyn Error>> {
        let start = (self.memory().last_addr().0 + 1).next_multiple_of(PLUG_ALIGN);
        let file = File::from(memfd_create("guest-memory", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes as u64)?;
        let file = FileOffset::new(file, 0);
        Ok(Arc::new(GuestRegionMmap::from_range(GuestAddress(start), bytes, Some(file))?))
    }

    /// Gives the guest the last region of `memory`. The other regions must be the present ones.
    pub fn plug(&self, memory: Memory) -> Result<(), Box<dyn Error>> {
        let mut present = self.locked_memory();
        let slot = present.num_regions();
        let region = memory.iter().nth(slot).ok_or("there is no region to plug")?;
        // SAFETY: as in `new`; the machine keeps the region from the next line on, and nothing fails in between.
        unsafe { set_slot(&self.vm, slot as u32, region) }?;
        *present = memory;
        Ok(())
    }

    /// A duplicate of the VM's descriptor, which the engine's dirty log owns.
    pub fn duplicate_vm_fd(&self) -> io::Result<OwnedFd> {
        // SAFETY: `self.vm` keeps the descriptor open for longer than this borrow.
        unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }.try_clone_to_owned()
    }
}

impl Machine {
    fn locked_memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Assigns a region to a KVM memory slot.
///
/// # Safety
/// The region must stay mapped until the last run of a vCPU has ended.
unsafe fn set_slot(
    vm: &VmFd,
    slot: u32,
    region: &GuestRegionMmap<AtomicBitmap>,
) -> Result<(), Box<dyn Error>> {
    let kvm_region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: region.start_addr().0,
        memory_size: region.len(),
        userspace_addr: region.get_host_address(MemoryRegionAddress(0))? as u64,
        flags: 0,
    };
    // SAFETY: the slot is the region's whole mapping, which the caller keeps.
    Ok(unsafe { vm.set_user_memory_region(kvm_region) }?)
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.pause();
    }
}

/// Maps two regions of one memfd. Memory that is shared with vhost-user processes needs a memfd too.
fn map_memory(bytes: usize) -> Result<Memory, Box<dyn Error>> {
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
