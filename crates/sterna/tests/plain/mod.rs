//! A VM that is nothing but RAM: tests say what it holds and when it changes.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::{Arc, Mutex};

use sterna::ram::dirty::SoftwareLog;
use sterna::ram::{DirtySource, GuestRam, PAGE_SIZE};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Vm, VmError};

/// RAM, its log, and what the guest does last and first.
pub struct Plain {
    pub ram: GuestRam,
    pub log: SoftwareLog,
    /// What a block may hold before a guest comes.
    pub may_hold_bytes: bool,
    last: Mutex<Option<Act>>,
    resumed: Mutex<Option<Act>>,
    hooks: Mutex<Vec<Arc<dyn Hook>>>,
    /// The memory that the VM says it has now, if not `ram`.
    changed: Mutex<Option<GuestRam>>,
}

type Act = Box<dyn FnOnce(&Plain) + Send>;

impl Plain {
    pub fn new(ram: GuestRam) -> Arc<Self> {
        Self::with(ram, false)
    }

    pub fn with(ram: GuestRam, may_hold_bytes: bool) -> Arc<Self> {
        let log = SoftwareLog::new(&ram);
        Arc::new(Self {
            ram,
            log,
            may_hold_bytes,
            last: Mutex::default(),
            resumed: Mutex::default(),
            hooks: Mutex::default(),
            changed: Mutex::default(),
        })
    }

    /// What the guest does when all of its memory has been sent, just before it stops.
    pub fn at_last(&self, act: impl FnOnce(&Plain) + Send + 'static) {
        *self.last.lock().unwrap() = Some(Box::new(act));
    }

    /// What happens when the guest is told to run on.
    pub fn at_resume(&self, act: impl FnOnce(&Plain) + Send + 'static) {
        *self.resumed.lock().unwrap() = Some(Box::new(act));
    }

    /// Something that changes hands with the guest.
    pub fn add_hook(&self, hook: Arc<dyn Hook>) {
        self.hooks.lock().unwrap().push(hook);
    }

    /// From now on the VM has other memory.
    pub fn change_ram(&self, ram: GuestRam) {
        *self.changed.lock().unwrap() = Some(ram);
    }

    /// Fills a page of block 0 with `byte`, as the guest.
    pub fn write(&self, page: u64, byte: u8) {
        self.ram.block(0).write(page * PAGE_SIZE as u64, &[byte; PAGE_SIZE]).unwrap();
        self.log.mark(0, page);
    }
}

/// The byte that fills a page of block 0.
pub fn byte_of(ram: &GuestRam, page: u64) -> u8 {
    let mut content = [0; PAGE_SIZE];
    ram.block(0).read(page * PAGE_SIZE as u64, &mut content).unwrap();
    assert!(content.iter().all(|&byte| byte == content[0]), "page {page} is of two kinds");
    content[0]
}

impl Vm for Plain {
    fn machine_type(&self) -> String {
        "plain".into()
    }
    fn ram(&self) -> GuestRam {
        self.changed.lock().unwrap().clone().unwrap_or_else(|| self.ram.clone())
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.hooks.lock().unwrap().clone()
    }
}

impl SourceVm for Plain {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.log
    }
    fn run_state(&self) -> RunState {
        RunState::Running
    }
    fn stop(&self) -> Result<(), VmError> {
        if let Some(act) = self.last.lock().unwrap().take() {
            act(self);
        }
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        if let Some(act) = self.resumed.lock().unwrap().take() {
            act(self);
        }
        Ok(())
    }
}

impl TargetVm for Plain {
    fn may_hold_bytes(&self, _block: usize) -> bool {
        self.may_hold_bytes
    }
    fn start(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn reset(&self) {}
}
