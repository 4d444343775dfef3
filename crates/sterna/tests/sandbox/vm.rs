//! A VM without threads of its own, so that every thread in the sandbox is the engine's.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use sterna::ram::dirty::SoftwareLog;
use sterna::ram::{Backing, DirtySource, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Vm, VmError};

use crate::support::bank::{Bank, BankDevice};

/// Pages of the only block.
pub const PAGES: u64 = 2048;

pub struct LockedVm {
    pub ram: GuestRam,
    pub log: Arc<SoftwareLog>,
    /// The log that the engine uses.
    pub dirty: Arc<dyn DirtySource>,
    banks: Vec<Arc<Bank>>,
    /// Fails the callback of the switchover, so that the source continues.
    pub refuses_start: AtomicBool,
    running: Mutex<bool>,
    /// The byte that fills each page.
    written: Vec<AtomicU8>,
}

impl LockedVm {
    /// A guest whose even pages have content.
    pub fn new(backing: Backing, banks: Vec<Arc<Bank>>, is_filled: bool) -> Arc<Self> {
        let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, backing).unwrap();
        let ram = GuestRam::new(vec![block]).unwrap();
        let log = Arc::new(SoftwareLog::new(&ram));
        let (refuses_start, running) = (AtomicBool::new(false), Mutex::new(is_filled));
        let written = (0..PAGES).map(|_| AtomicU8::new(0)).collect();
        let vm = Self { dirty: Arc::clone(&log) as _, ram, log, banks, refuses_start, running, written };
        if is_filled {
            (0..PAGES).step_by(2).for_each(|page| vm.write(page, page as u8 | 1));
        }
        Arc::new(vm)
    }

    /// The same with another log for the engine.
    pub fn with_dirty(self: Arc<Self>, dirty: Arc<dyn DirtySource>) -> Arc<Self> {
        let mut vm = Arc::into_inner(self).expect("it is new");
        vm.dirty = dirty;
        Arc::new(vm)
    }

    pub fn write(&self, page: u64, byte: u8) {
        self.ram.block(0).write(page * PAGE_SIZE as u64, &[byte; PAGE_SIZE]).unwrap();
        self.log.mark(0, page);
        self.written[page as usize].store(byte, Ordering::Release);
    }

    /// Writes as the guest, unless it is stopped. Returns whether it was running.
    pub fn write_if_running(&self, page: u64, byte: u8) -> bool {
        let running = self.running.lock().unwrap();
        if *running {
            self.write(page, byte);
        }
        *running
    }

    pub fn is_running(&self) -> bool {
        *self.running.lock().unwrap()
    }

    /// Whether the memory of `arrived` is what was written here. This side may have given its own memory away.
    pub fn is_equal_to(&self, arrived: &Self) -> bool {
        (0..PAGES).all(|page| {
            let mut bytes = [0; PAGE_SIZE];
            arrived.ram.block(0).read(page * PAGE_SIZE as u64, &mut bytes).unwrap();
            let byte = self.written[page as usize].load(Ordering::Acquire);
            bytes.iter().all(|found| *found == byte)
        })
    }
}

impl Vm for LockedVm {
    fn machine_type(&self) -> String {
        "locked".to_owned()
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.banks.iter().map(|bank| Arc::new(BankDevice(Arc::clone(bank))) as Arc<dyn Device>).collect()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }
}

impl SourceVm for LockedVm {
    fn dirty_source(&self) -> &dyn DirtySource {
        &*self.dirty
    }
    fn run_state(&self) -> RunState {
        if self.is_running() { RunState::Running } else { RunState::Paused }
    }
    fn may_hold_writes(&self) -> bool {
        true
    }
    fn configuration(&self) -> Option<Vec<u8>> {
        Some(b"locked".to_vec())
    }
    fn stop(&self) -> Result<(), VmError> {
        *self.running.lock().unwrap() = false;
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        *self.running.lock().unwrap() = true;
        Ok(())
    }
}

impl TargetVm for LockedVm {
    fn start(&self) -> Result<(), VmError> {
        if self.refuses_start.load(Ordering::Acquire) {
            return Err(VmError::new("start", "told to fail"));
        }
        *self.running.lock().unwrap() = true;
        Ok(())
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn reset(&self) {}
}
