//! What a monitor needs of a VMM besides what the engine does.

use sterna::{SourceVm, TargetVm, VmError};

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
}
