//! Faults that are planted to test that the judge finds them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna::{Device, Hook, RunState, SourceVm, Throttle, Vm, VmError};

use crate::staged::Staged;

/// A planted fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// The guest's writes after a reconnection are never reported. Pages that were sent stay stale.
    StaleAfterReconnection,
    /// Pages that have become zero are never reported. They keep their content at the destination.
    UntoldZeros,
    /// The source resumes its guest while the guest runs at the destination.
    RunsAgain,
    /// Pages change at the source after the guest has left.
    ChangedPages,
    /// A descriptor stays open at the destination.
    Descriptor,
    /// Memory stays mapped at the destination.
    Mapping,
    /// Connections are not replaced.
    NoWindow,
}

/// A source's VM with a planted fault.
pub(super) struct Planted {
    vm: Arc<Staged>,
    plant: Plant,
    dirty: Forgetful,
}

impl Planted {
    pub(super) fn new(vm: &Arc<Staged>, plant: Plant) -> Arc<Self> {
        let drops_zeros = plant == Plant::UntoldZeros;
        let dirty = Forgetful { vm: Arc::clone(vm), forgets: AtomicBool::new(false), drops_zeros };
        Arc::new(Self { vm: Arc::clone(vm), plant, dirty })
    }

    /// Called for each mark that the source reports.
    pub(super) fn told(&self, mark: &str) {
        match (self.plant, mark) {
            (Plant::StaleAfterReconnection, "reconnected") => {
                self.dirty.forgets.store(true, Ordering::SeqCst);
            }
            // The fault: the VM resumes without a call of the engine.
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

/// A dirty source that can lose writes.
struct Forgetful {
    vm: Arc<Staged>,
    forgets: AtomicBool,
    /// Pages that are zero are never reported.
    drops_zeros: bool,
}

impl Forgetful {
    fn sync_without_zeros(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let ram = self.vm.ram();
        let mut found = DirtyBitmaps::new(&ram);
        let report = self.vm.dirty_source().sync(&mut found)?;
        for (index, block) in ram.blocks().iter().enumerate() {
            for page in (0..block.pages()).filter(|page| found.block(index).get(*page)) {
                let is_zero = block.page(page).is_ok_and(|page| page.is_zero().unwrap_or(false));
                if !is_zero {
                    into.block(index).set_range(page, 1);
                }
            }
        }
        Ok(report)
    }
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
        if self.drops_zeros {
            return self.sync_without_zeros(into);
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
