//! What a monitor needs of a VMM besides what the engine does.

use sterna::{SourceVm, TargetVm, VmError};

use super::announcing::Announcing;
use super::protection::ProtectionMeans;

/// A disk that the VMM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDevice {
    /// The file or device.
    pub file: String,
    /// QEMU's word for its format.
    pub format: &'static str,
    /// What the guest sees.
    pub len_bytes: u64,
    /// The guest cannot write it.
    pub is_read_only: bool,
    /// The file that has what this one has not.
    pub backing_file: Option<String>,
}

/// A virtual machine behind a monitor.
pub trait MonitoredVm: SourceVm + TargetVm {
    /// Stops the guest on an operator's word (`stop`). Idempotent. As [`MonitoredVm::cont`], it is called while
    /// a migration is kept from taking the guest, so it must be short and ask no migration anything.
    fn pause(&self) -> Result<(), VmError>;
    /// Lets the guest run (`cont`). Idempotent; short, as [`MonitoredVm::pause`].
    fn cont(&self) -> Result<(), VmError>;
    /// Ends the VMM (`quit`): asks for it and returns; the answer to the client is out already.
    fn quit(&self);
    /// False while the VM waits for a migration to bring its guest.
    fn has_guest(&self) -> bool;
    /// For people; may be empty.
    fn name(&self) -> String;
    /// The vCPUs' threads, in the vCPUs' order.
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
    /// Makes one of [`MonitoredVm::disks`] as long as that (`block_resize`), while no migration has the guest. An error says why
    /// not.
    fn resize_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmError> {
        let _ = (index, len_bytes);
        Err(VmError::new("block_resize", "this VM cannot do that"))
    }
    /// What this VM has for being a side of a protection (`x-colo`); `None`: it cannot be one.
    fn protection(&self) -> Option<ProtectionMeans> {
        None
    }
    /// The protection of the guest that was here has ended, and the standby has it: this VM has no further use.
    fn guest_is_lost(&self) {
        self.quit();
    }
    /// How a guest is announced that arrives from now on.
    fn set_announcing(&self, announcing: Announcing) {
        let _ = announcing;
    }
    /// Announces the guest's network cards by their numbers, all if none is named (`announce-self`). What goes on under the same
    /// `id` ends. Returns at once.
    fn announce(&self, announcing: Announcing, cards: &[usize], id: &str) -> Result<(), VmError> {
        let _ = (announcing, cards, id);
        Ok(())
    }
}
