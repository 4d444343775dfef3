//! A VM that has only RAM. Tests determine its content, and when it changes.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::{Arc, Mutex};

use sterna::ram::dirty::SoftwareLog;
use sterna::ram::{DirtySource, GuestRam, PAGE_SIZE};
use sterna::{Device, Hook, HostDescriptors, RunState, SourceVm, TargetVm, Vm, VmError};

/// RAM, its log, and callbacks for the guest's last and first actions.
pub struct Plain {
    pub ram: GuestRam,
    pub log: SoftwareLog,
    /// Whether a block may have content before a guest arrives.
    pub may_hold_bytes: bool,
    last: Mutex<Option<Act>>,
    resumed: Mutex<Option<Act>>,
    hooks: Mutex<Vec<Arc<dyn Hook>>>,
    descriptors: Mutex<Vec<Arc<dyn HostDescriptors>>>,
    /// Memory that the VM reports now, if it differs from `ram`.
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
            descriptors: Mutex::default(),
            changed: Mutex::default(),
        })
    }

    /// Sets an action that runs when all memory has been sent, just before the guest stops.
    pub fn at_last(&self, act: impl FnOnce(&Plain) + Send + 'static) {
        *self.last.lock().unwrap() = Some(Box::new(act));
    }

    /// Sets an action that runs when the guest is resumed.
    pub fn at_resume(&self, act: impl FnOnce(&Plain) + Send + 'static) {
        *self.resumed.lock().unwrap() = Some(Box::new(act));
    }

    /// Adds a hook, which is handed over with the guest.
    pub fn add_hook(&self, hook: Arc<dyn Hook>) {
        self.hooks.lock().unwrap().push(hook);
    }

    /// Adds descriptors that are passed, with the memory, to another process of this host.
    pub fn add_descriptors(&self, held: Arc<dyn HostDescriptors>) {
        self.descriptors.lock().unwrap().push(held);
    }

    /// From now on the VM reports other memory.
    pub fn change_ram(&self, ram: GuestRam) {
        *self.changed.lock().unwrap() = Some(ram);
    }

    /// Fills a page of block 0 with `byte`, as a write of the guest.
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
    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        self.descriptors.lock().unwrap().clone()
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
