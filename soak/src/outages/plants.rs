//! Faults that are planted to see that they are found.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna::{Device, Hook, RunState, SourceVm, Throttle, Vm, VmError};

use crate::staged::Staged;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// What the guest writes after a connection was made anew is never reported: pages that were sent stay as they were.
    StaleAfterReconnection,
    /// The source lets its guest run again when it runs at the destination.
    RunsAgain,
    /// A page changes at the source when the guest has left.
    ChangedPages,
    /// A descriptor stays open at the destination.
    Descriptor,
    /// Memory stays mapped there.
    Mapping,
    /// Nobody connects again.
    NoWindow,
}

/// A source's VM with a fault.
pub(super) struct Planted {
    vm: Arc<Staged>,
    plant: Plant,
    dirty: Forgetful,
}

impl Planted {
    pub(super) fn new(vm: &Arc<Staged>, plant: Plant) -> Arc<Self> {
        let dirty = Forgetful { vm: Arc::clone(vm), forgets: AtomicBool::new(false) };
        Arc::new(Self { vm: Arc::clone(vm), plant, dirty })
    }

    /// The source has told this.
    pub(super) fn told(&self, mark: &str) {
        match (self.plant, mark) {
            (Plant::StaleAfterReconnection, "reconnected") => {
                self.dirty.forgets.store(true, Ordering::SeqCst);
            }
            // The engine is asked by nobody: that is the fault.
            (Plant::RunsAgain, "postcopy-active") => drop(self.vm.resume()),
            (Plant::ChangedPages, "postcopy-active") => {
                for block in self.vm.ram().blocks() {
                    for page in 0..block.pages() {
                        drop(block.write(page << 12, &[0xee; 64]));
                    }
                }
            }
            _ => {}
        }
    }
}

impl Vm for Planted {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.vm.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.vm.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.vm.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.vm.hooks()
    }
}

impl SourceVm for Planted {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }
    fn run_state(&self) -> RunState {
        self.vm.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.vm.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.vm.resume()
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        self.vm.throttle()
    }
}

/// Finds writes, and may keep them for itself.
struct Forgetful {
    vm: Arc<Staged>,
    forgets: AtomicBool,
}

impl DirtySource for Forgetful {
    fn start(&self) -> Result<(), DirtyError> {
        self.vm.dirty_source().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.vm.dirty_source().stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        if self.forgets.load(Ordering::SeqCst) {
            return self.vm.dirty_source().sync(&mut DirtyBitmaps::new(&self.vm.ram()));
        }
        self.vm.dirty_source().sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.vm.dirty_source().rearm(block, first, count, synced)
    }
    fn initially_set(&self) -> bool {
        self.vm.dirty_source().initially_set()
    }
    fn name(&self) -> &'static str {
        self.vm.dirty_source().name()
    }
}
