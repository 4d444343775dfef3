//! The monitor's interface to a VMM, in addition to the engine's.

use std::ops::Deref;
use std::sync::Arc;

use sterna::ram::engine_lock::assert_none_held;
use sterna::{SourceVm, TargetVm, VmError};

use super::announcing::Announcing;
use super::protection::ProtectionMeans;

/// A disk of the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDevice {
    /// Path of the file or device.
    pub file: String,
    /// QEMU's name of its format.
    pub format: &'static str,
    /// Size that the guest sees, in bytes.
    pub len_bytes: u64,
    /// Whether the guest cannot write to it.
    pub is_read_only: bool,
    /// The file that contains the blocks that this file lacks.
    pub backing_file: Option<String>,
}

/// A virtual machine that a monitor controls.
pub trait MonitoredVm: SourceVm + TargetVm {
    /// Pauses the guest, by an operator's `stop`. Idempotent. Like [`MonitoredVm::cont`], it is called as an act of
    /// [`GuestRam::while_free`](sterna::ram::GuestRam::while_free), in its own thread and without a lock. A switchover
    /// waits for it. In postcopy it may wait for a vCPU that waits for a page.
    fn pause(&self) -> Result<(), VmError>;
    /// Runs the guest, by an operator's `cont`. Idempotent. Called like [`MonitoredVm::pause`].
    fn cont(&self) -> Result<(), VmError>;
    /// Requests the end of the VMM (`quit`) and returns. The client has its answer already.
    fn quit(&self);
    /// False while the VM waits for a migration to bring its guest. Like `run_state`, it is called by queries, so it
    /// must not wait for a pause that is under way.
    fn has_guest(&self) -> bool;
    /// Name of the VM for people. May be empty.
    fn name(&self) -> String;
    /// Thread ids of the vCPUs, in the order of the vCPUs.
    fn vcpu_threads(&self) -> Vec<i32> {
        Vec::new()
    }
    /// Whether KVM runs the guest.
    fn uses_kvm(&self) -> bool {
        false
    }
    /// The guest's disks, for `query-block`.
    fn disks(&self) -> Vec<BlockDevice> {
        Vec::new()
    }
    /// Changes the size of one of [`MonitoredVm::disks`] (`block_resize`), while no migration has the guest. The error
    /// contains the reason.
    fn resize_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmError> {
        let _ = (index, len_bytes);
        Err(VmError::new("block_resize", "this VM does not support the operation"))
    }
    /// The VM's settings and functions for a protection (`x-colo`). `None` if it supports none.
    fn protection(&self) -> Option<ProtectionMeans> {
        None
    }
    /// Called when a protection has ended and the standby has the guest. This VM is not needed any more.
    fn guest_is_lost(&self) {
        self.quit();
    }
    /// Sets how guests that arrive from now on are announced.
    fn set_announcing(&self, announcing: Announcing) {
        let _ = announcing;
    }
    /// Announces the guest's network cards with these numbers, or all if there are none (`announce-self`). Ends an
    /// announcement with the same `id`. Returns immediately.
    fn announce(&self, announcing: Announcing, cards: &[usize], id: &str) -> Result<(), VmError> {
        let _ = (announcing, cards, id);
        Ok(())
    }
}

/// The VM. Its callbacks must run under no lock of the engine or the monitor: a debug build panics otherwise.
pub(super) struct Vmm(Arc<dyn MonitoredVm>);

impl Vmm {
    pub(super) fn new(vm: Arc<dyn MonitoredVm>) -> Self {
        Self(vm)
    }

    /// Another handle of the VM. Calls no callback.
    pub(super) fn shared(&self) -> Arc<dyn MonitoredVm> {
        Arc::clone(&self.0)
    }
}

impl Deref for Vmm {
    type Target = dyn MonitoredVm;
    fn deref(&self) -> &Self::Target {
        assert_none_held("a callback of MonitoredVm");
        &*self.0
    }
}
