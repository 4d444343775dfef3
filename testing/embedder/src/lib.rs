//! The smallest VM: memory, and no device or vCPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna::ram::dirty::{DirtySource, SoftwareLog};
use sterna::ram::{Backing, GuestRam, RamBlock};
use sterna::{Device, RunState, SourceVm, TargetVm, Vm, VmError};

/// Bytes of the VM's memory: 8 MiB.
pub const BYTES: u64 = 8 << 20;

/// A VM whose guest never writes.
pub struct Machine {
    /// Its memory.
    pub ram: GuestRam,
    log: SoftwareLog,
    runs: AtomicBool,
}

impl Machine {
    /// A VM without a guest.
    pub fn new() -> Arc<Self> {
        let block = RamBlock::new("ram", BYTES, Backing::Memfd).expect("memory");
        let ram = GuestRam::new(vec![block]).expect("one block");
        Arc::new(Self { log: SoftwareLog::new(&ram), runs: AtomicBool::new(false), ram })
    }

    /// A VM with a guest, whose pages differ from each other.
    pub fn with_guest() -> Arc<Self> {
        let machine = Self::new();
        for page in (0..BYTES / 4096).step_by(3) {
            machine.ram.block(0).write(page * 4096, &page.to_le_bytes()).expect("written");
        }
        machine.runs.store(true, Ordering::SeqCst);
        machine
    }

    /// Everything in memory.
    pub fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        self.ram.block(0).read(0, &mut bytes).expect("read");
        bytes
    }

    fn set(&self, runs: bool) -> Result<(), VmError> {
        self.runs.store(runs, Ordering::SeqCst);
        Ok(())
    }
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        "embedder".to_owned()
    }

    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.log
    }

    fn run_state(&self) -> RunState {
        if self.runs.load(Ordering::SeqCst) { RunState::Running } else { RunState::Paused }
    }

    fn stop(&self) -> Result<(), VmError> {
        self.set(false)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.set(true)
    }
}

impl TargetVm for Machine {
    fn start(&self) -> Result<(), VmError> {
        self.set(true)
    }

    fn reset(&self) {}
}
