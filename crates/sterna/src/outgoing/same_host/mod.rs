//! Moves a guest to another process on this host without copying its memory.
//!
//! The destination gets descriptors of the memory.
//!
//! No writes are tracked and no page is sent. Both processes use the same memory, so it contains every write of
//! the guest.

pub(super) mod handing_over;

use std::sync::Arc;

use sterna_ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna_wire::main::Configuration;
use sterna_wire::ram::BlockList;

use super::guest_source::{GuestSource, LiveVm, PageReader};
use super::main_stream::MainStream;
use crate::error::{MigrationError, VmError};
use crate::hooks::Hook;
use crate::threads::tried;
use crate::throttle::Throttle;
use crate::vm::{Device, HostDescriptors, RunState, SourceVm, Vm};

/// A VM of this process whose memory is not sent.
pub(super) struct SharedMemory {
    live: LiveVm,
    vm: Arc<dyn SourceVm>,
}

impl SharedMemory {
    pub(super) fn new(vm: Arc<dyn SourceVm>) -> Self {
        Self { live: LiveVm::new(Arc::clone(&vm)), vm: Arc::new(Untracked { vm, nothing: NothingDirty }) }
    }
}

/// Releases the guest's memory and descriptors, after the destination has taken the guest.
pub(super) fn let_go(vm: &dyn SourceVm, ram: &GuestRam) {
    for held in vm.host_descriptors() {
        if let Err(error) = tried("HostDescriptors::let_go", || {
            held.let_go();
            Ok::<(), MigrationError>(())
        }) {
            tracing::error!("descriptors that the destination has: {error}");
        }
    }
    for block in ram.blocks() {
        if let Err(error) = block.let_go() {
            // Nothing in this process accesses the memory any more, even if it is still mapped.
            tracing::error!("memory that the destination has: {error}");
        }
    }
}

impl GuestSource for SharedMemory {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn vm(&self) -> &Arc<dyn SourceVm> {
        &self.vm
    }

    fn ram(&self) -> &GuestRam {
        self.live.ram()
    }

    fn configuration(&self) -> Configuration {
        self.live.configuration()
    }

    fn blocks(&self) -> BlockList {
        self.live.blocks()
    }

    fn section_ids(&self) -> (u32, u32) {
        self.live.section_ids()
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        self.live.reader()
    }

    /// Removes all pages, because none is sent.
    fn leave_out(&self, pages: &DirtyBitmaps) {
        pages.clear_all();
    }

    fn knows_absent(&self) -> bool {
        false
    }

    fn send_early(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        self.live.send_early(stream)
    }

    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError> {
        self.live.send_switchover_start(stream)
    }

    fn send_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError> {
        self.live.send_devices(stream, run_state)
    }

    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        self.live.send_end(stream)
    }
}

/// The VM without tracking of its writes, which are not needed here.
struct Untracked {
    vm: Arc<dyn SourceVm>,
    nothing: NothingDirty,
}

impl Vm for Untracked {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.vm.uuid()
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

    fn shares_ram_with(&self) -> Option<String> {
        self.vm.shares_ram_with()
    }

    fn cannot_follow(&self) -> Option<String> {
        self.vm.cannot_follow()
    }

    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        self.vm.host_descriptors()
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.vm.hooks()
    }
}

impl SourceVm for Untracked {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.nothing
    }

    fn run_state(&self) -> RunState {
        self.vm.run_state()
    }

    fn stop(&self) -> Result<(), VmError> {
        self.vm.stop()
    }

    fn quiesce(&self) -> Result<(), VmError> {
        self.vm.quiesce()
    }

    fn resume(&self) -> Result<(), VmError> {
        self.vm.resume()
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        self.vm.throttle()
    }

    fn configuration(&self) -> Option<Vec<u8>> {
        self.vm.configuration()
    }
}

/// A dirty source that never reports a page.
struct NothingDirty;

impl DirtySource for NothingDirty {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }

    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        "none"
    }
}
