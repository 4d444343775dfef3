//! Values that were measured at a VM.

use serde::{Deserialize, Serialize};

/// Values that were measured at a VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The address of the VM's monitor.
    pub at: String,
    /// Name and version of the VM.
    pub monitor: String,
    /// The VM's status: `running`, `paused`…
    pub run_state: String,
    /// How pages were counted: `dirty-bitmap`, `dirty-ring` or `page-sampling`; none if it was not measured.
    pub mode: Option<String>,
    /// Bytes per second that each vCPU dirtied in the longest interval; empty if the VM reports none.
    #[serde(default)]
    pub vcpu_dirty_bytes: Vec<u64>,
}
