//! What hosting needs of a machine and of its guest.

use std::sync::Arc;

use sterna::{SourceVm, TargetVm, VmError};
use sterna_qmp::{Announcing, BlockDevice};
use sterna_standby::EpochGate;

/// Counters that show the progress of a guest.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GuestProgress {
    /// Pages that each vCPU or thread has written.
    pub steps: Vec<u64>,
    /// Beats (signs of life) of each vCPU or thread.
    pub beats: Vec<u64>,
    /// The longest time between two beats of a vCPU, seconds; none if the guest has no clock.
    pub longest_gap_seconds: Option<f64>,
    /// Pages per second and vCPU that the guest has written over the last 2 s. Equals `--rate` if the guest
    /// can keep it.
    #[serde(default)]
    pub pages_per_second: Option<f64>,
}

/// How a guest ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestEnd {
    /// The reason, for people.
    pub why: String,
    /// QEMU's name of the cause, in the event SHUTDOWN.
    pub cause: &'static str,
}

impl GuestEnd {
    /// The cause of a guest that switched its machine off, which is no failure.
    pub const POWERED_OFF: &'static str = "guest-shutdown";
}

/// Functions of a machine that only hosting needs.
pub trait Machine: SourceVm + TargetVm + 'static {
    /// Pauses the guest; see [`MonitoredVm::pause`](sterna_qmp::MonitoredVm::pause).
    fn pause(&self) -> Result<(), VmError>;
    /// Lets the guest run; see [`MonitoredVm::cont`](sterna_qmp::MonitoredVm::cont).
    fn cont(&self) -> Result<(), VmError>;
    /// Ends the guest; called when the VM quits.
    fn end(&self);
    /// Why the guest ended by itself; none if it did not.
    fn ended(&self) -> Option<GuestEnd> {
        None
    }
    /// Whether the VM has its guest; see [`MonitoredVm::has_guest`](sterna_qmp::MonitoredVm::has_guest).
    fn has_guest(&self) -> bool;
    /// The VM's name; see [`MonitoredVm::name`](sterna_qmp::MonitoredVm::name).
    fn name(&self) -> String;
    /// Ids of the vCPUs' threads; see [`MonitoredVm::vcpu_threads`](sterna_qmp::MonitoredVm::vcpu_threads).
    fn vcpu_threads(&self) -> Vec<i32> {
        Vec::new()
    }
    /// Types `bytes` into the guest's console, if it has one. Returns the number of accepted bytes; the
    /// caller may retry the others.
    fn type_in(&self, bytes: &[u8]) -> usize {
        bytes.len()
    }
    /// The gate that holds packets of the network cards while the guest is protected; none without cards.
    fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        None
    }
    /// Whether KVM runs the guest.
    fn uses_kvm(&self) -> bool;
    /// The guest's disks; see [`MonitoredVm::disks`](sterna_qmp::MonitoredVm::disks).
    fn disks(&self) -> Vec<BlockDevice> {
        Vec::new()
    }
    /// Changes the length of a disk; see [`MonitoredVm::resize_disk`](sterna_qmp::MonitoredVm::resize_disk).
    fn resize_disk(&self, index: usize, _len_bytes: u64) -> Result<(), VmError> {
        Err(VmError::new("block_resize", format!("this machine has no disk {index}")))
    }
    /// Sets how arriving guests are announced; see
    /// [`MonitoredVm::set_announcing`](sterna_qmp::MonitoredVm::set_announcing).
    fn set_announcing(&self, _announcing: Announcing) {}
    /// Announces network cards now; see [`MonitoredVm::announce`](sterna_qmp::MonitoredVm::announce).
    fn announce(&self, _announcing: Announcing, _cards: &[usize], _id: &str) -> Result<(), VmError> {
        Ok(())
    }
}

/// A guest that writes its memory by rules, so that the host can check it.
pub trait Guest: Send + Sync {
    /// Whether RAM is one consistent cut. The guest must be paused. The error tells why RAM cannot be
    /// checked.
    fn check(&self) -> Result<sterna_guests::Verdict, String>;
    /// The guest's counters. The error tells why they are not available.
    fn progress(&self) -> Result<GuestProgress, String>;
    /// Changes the rate, pages per second and vCPU.
    fn set_rate(&self, pages_per_second: u64) -> Result<(), String>;
    /// Resets the longest gap between beats.
    fn reset_gap(&self) -> Result<(), String>;
}

/// A machine and, if it can be checked, the guest in it.
pub struct Parts {
    /// The machine, which runs the guest.
    pub machine: Arc<dyn Machine>,
    /// Access to the guest's counters and its check; none if its writes follow no known rule.
    pub guest: Option<Arc<dyn Guest>>,
}
