//! Implements the engine's traits for the machine.

use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna::ram::dirty::{AtomicBitmapLog, Combined, KvmDirtyLog, KvmSlot, Replaceable};
use sterna::ram::{DirtySource, GuestRam, MemoryPermissions, RamBlock, RegionPlan};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Vm, VmError};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{ByteValued, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::disk::Disk;
use crate::machine::{Machine, Memory};
use crate::vcpu;

/// The machine, its disk and its memory in the form that the engine uses.
pub struct Migratable {
    machine: Arc<Machine>,
    disk: Option<Arc<Disk>>,
    ram: Mutex<GuestRam>,
    dirty: Replaceable,
}

impl Migratable {
    /// Gives each region of guest memory a name and the permissions of the engine.
    pub fn new(machine: Arc<Machine>, disk: Option<Arc<Disk>>) -> Result<Self, Box<dyn Error>> {
        let memory = machine.memory();
        let ram = GuestRam::from_guest_memory(&memory, |_, region| plan(region))?;
        let dirty = Replaceable::new(dirty_source(&machine, &memory, &ram)?);
        Ok(Self { machine, disk, ram: Mutex::new(ram), dirty })
    }

    /// Plugs memory. The engine must agree first, because it refuses while a migration involves the guest.
    pub fn plug(&self, bytes: usize) -> Result<(), Box<dyn Error>> {
        let mut ram = self.locked_ram();
        let region = self.machine.map_more(bytes)?;
        let block = RamBlock::from_region(&region, plan(&region))?;
        let plugged = ram.with_blocks(ram.blocks().iter().cloned().chain([block]).collect())?;
        let memory = self.machine.memory().insert_region(region)?;
        let done = dirty_source(&self.machine, &memory, &plugged).and_then(|dirty| {
            self.machine.plug(memory)?;
            Ok(self.dirty.replace(dirty)?)
        });
        // `with_blocks` moved the custody of the guest to `plugged`; if nothing was plugged it goes back.
        *ram = if done.is_ok() { plugged } else { plugged.with_blocks(ram.blocks().to_vec())? };
        done
    }

    /// Makes the machine that [`SourceVm::configuration`] of the source describes.
    pub fn from_configuration(configuration: &[u8], disk: Option<Arc<Disk>>) -> Result<Self, Box<dyn Error>> {
        // The bytes are the source's. A host that serves many tenants limits the sum here.
        let size = |bytes: &[u8]| -> Result<usize, Box<dyn Error>> {
            Ok(usize::try_from(u64::from_le_bytes(bytes.try_into()?))?)
        };
        let sizes = configuration.chunks(8).map(size).collect::<Result<Vec<_>, _>>()?;
        let (boot, plugged) = sizes.split_first().ok_or("the configuration is empty")?;
        let vm = Self::new(Arc::new(Machine::new(*boot)?), disk)?;
        plugged.iter().try_for_each(|bytes| vm.plug(*bytes))?;
        Ok(vm)
    }

    /// The machine without its migrations.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    fn locked_ram(&self) -> MutexGuard<'_, GuestRam> {
        self.ram.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a region, and the engine's permissions. The name is the same on both sides.
fn plan(region: &GuestRegionMmap<AtomicBitmap>) -> RegionPlan {
    RegionPlan::named(format!("ram@{:#x}", region.start_addr().0))
        // No device has pinned this memory. With VFIO: MemoryPermissions::none().
        .permit(MemoryPermissions::none().allow_discard())
        .fresh()
}

/// Combines the logs of two kinds of writers.
///
/// KVM reports the writes of vCPUs. The bitmap of `vm-memory` reports the writes of the VMM's
/// devices.
fn dirty_source(
    machine: &Machine,
    memory: &Memory,
    ram: &GuestRam,
) -> Result<Arc<dyn DirtySource>, Box<dyn Error>> {
    let slots = ram.blocks().iter().enumerate().map(|(index, block)| KvmSlot {
        slot: index as u32,
        flags: 0,
        guest_address: block.guest_address().expect("a region has one"),
        block: index,
        first_page: 0,
        pages: block.pages(),
    });
    let vcpus = KvmDirtyLog::new(machine.duplicate_vm_fd()?, slots.collect(), ram.clone())?;
    let devices = AtomicBitmapLog::new(ram, memory)?;
    Ok(Arc::new(Combined::new(vec![Arc::new(vcpus), Arc::new(devices)])))
}

impl Vm for Migratable {
    fn machine_type(&self) -> String {
        "vm-memory-vmm-1".into()
    }
    fn ram(&self) -> GuestRam {
        self.locked_ram().clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![Arc::new(VcpuState(self.machine.clone())), Arc::new(TickerState(self.machine.clone()))]
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.disk.iter().map(|disk| Arc::new(DiskLock(disk.clone())) as Arc<dyn Hook>).collect()
    }
}

impl SourceVm for Migratable {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }
    fn run_state(&self) -> RunState {
        if self.machine.vcpu().is_running() { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.machine.pause();
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.machine.resume();
        Ok(())
    }
    fn configuration(&self) -> Option<Vec<u8>> {
        // The regions below and above the hole are mapped together, and each of the others was plugged.
        let sizes: Vec<u64> = self.machine.memory().iter().map(|region| region.len()).collect();
        let sizes = [sizes[0] + sizes[1]].into_iter().chain(sizes[2..].iter().copied());
        Some(sizes.flat_map(u64::to_le_bytes).collect())
    }
}

impl TargetVm for Migratable {
    fn start(&self) -> Result<(), VmError> {
        self.machine.resume();
        Ok(())
    }
    fn reset(&self) {
        self.machine.ticker().set_count(0); // The next guest sets every register of the vCPU.
    }
}

/// Saves and loads the vCPU's registers.
struct VcpuState(Arc<Machine>);

impl Device for VcpuState {
    fn name(&self) -> String {
        "vcpu".into()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        let state = self.0.vcpu().state().map_err(|error| VmError::new("get the vCPU's registers", error))?;
        Ok(state.as_slice().to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let mut state = vcpu::State::default();
        if body.len() != state.as_slice().len() {
            return Err(VmError::new("load the vCPU", format!("{} bytes of registers", body.len())));
        }
        state.as_mut_slice().copy_from_slice(body);
        // KVM checks the values.
        self.0.vcpu().set_state(&state).map_err(|error| VmError::new("set the vCPU's registers", error))
    }
}

/// Saves and loads the ticker's count.
struct TickerState(Arc<Machine>);

impl Device for TickerState {
    fn name(&self) -> String {
        "ticker".into()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(self.0.ticker().count().to_le_bytes().to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let count = body.try_into().map_err(|error| VmError::new("load the ticker", error))?;
        self.0.ticker().set_count(u64::from_le_bytes(count));
        Ok(())
    }
}

/// Hands over the disk's lock while neither side runs the guest.
struct DiskLock(Arc<Disk>);

impl Hook for DiskLock {
    fn name(&self) -> String {
        "disk".into()
    }
    fn release(&self) -> Result<(), VmError> {
        self.0.unlock().map_err(|error| VmError::new("unlock the disk", error))
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.acquire()
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.0.lock().map_err(|error| VmError::new("lock the disk", error))
    }
    fn give_back(&self) {
        let _ = self.0.unlock();
    }
}
