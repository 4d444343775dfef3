//! Implements the engine's traits for the machine.

use std::error::Error;
use std::sync::Arc;

use sterna::ram::dirty::{AtomicBitmapLog, Combined, KvmDirtyLog, KvmSlot};
use sterna::ram::{DirtySource, GuestRam, MemoryPermissions, RegionPlan};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Vm, VmError};
use vm_memory::{ByteValued, GuestMemoryRegion};

use crate::machine::Machine;
use crate::vcpu;

/// The machine, and its memory in the form that the engine uses.
pub struct Migratable {
    machine: Arc<Machine>,
    mib: u32,
    ram: GuestRam,
    dirty: Combined,
}

impl Migratable {
    /// `mib`: the size of the guest's memory, which is the whole configuration of this machine.
    pub fn new(machine: Arc<Machine>, mib: u32) -> Result<Self, Box<dyn Error>> {
        let memory = machine.memory();
        let ram = GuestRam::from_guest_memory(&memory, |_, region| {
            RegionPlan::named(format!("ram@{:#x}", region.start_addr().0))
                .permit(MemoryPermissions::none().allow_discard())
                .fresh()
        })?;
        let slots = ram.blocks().iter().enumerate().map(|(index, block)| KvmSlot {
            slot: index as u32,
            flags: 0,
            guest_address: block.guest_address().expect("a region has one"),
            block: index,
            first_page: 0,
            pages: block.pages(),
        });
        let vcpus = KvmDirtyLog::new(machine.duplicate_vm_fd()?, slots.collect(), ram.clone())?;
        let devices = AtomicBitmapLog::new(&ram, &memory)?;
        let dirty = Combined::new(vec![Arc::new(vcpus), Arc::new(devices)]);
        Ok(Self { machine, mib, ram, dirty })
    }

    /// The size of the memory that a source's configuration asks for, in MiB. The peer wrote it.
    pub fn size_of(configuration: &[u8]) -> Result<u32, VmError> {
        let bytes =
            configuration.try_into().map_err(|error| VmError::new("read the configuration", error))?;
        match u32::from_le_bytes(bytes) {
            mib @ 1..=1024 => Ok(mib),
            mib => {
                Err(VmError::new("make the machine", format!("{mib} MiB of memory; 1 to 1024 are allowed")))
            }
        }
    }
}

impl Vm for Migratable {
    fn machine_type(&self) -> String {
        "sandboxed-vmm-1".into()
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![Arc::new(VcpuState(self.machine.clone())), Arc::new(TickerState(self.machine.clone()))]
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }
}

impl SourceVm for Migratable {
    fn configuration(&self) -> Option<Vec<u8>> {
        Some(self.mib.to_le_bytes().to_vec())
    }
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
}

impl TargetVm for Migratable {
    fn start(&self) -> Result<(), VmError> {
        self.machine.resume();
        Ok(())
    }
    fn reset(&self) {
        self.machine.ticker().set_count(0);
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
