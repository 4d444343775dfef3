//! The operator's settings that the policy uses.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The operator's settings for the policy. All of them may change while a migration runs, except `auto_converge` and
/// `dirty_limit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Parameter `max-bandwidth`, in bytes per second. It applies while the guest runs. 0: no limit.
    pub max_bandwidth_bytes: u64,
    /// Parameter `avail-switchover-bandwidth`, in bytes per second. 0: use the measured bandwidth.
    pub avail_switchover_bandwidth_bytes: u64,
    /// Parameter `downtime-limit`.
    pub downtime_limit: Duration,
    /// First throttle, in percent of the time that vCPUs sleep.
    pub cpu_throttle_initial: u8,
    /// Increase of the throttle per step, in percent.
    pub cpu_throttle_increment: u8,
    /// Whether the steps of the throttle become smaller near the threshold.
    pub cpu_throttle_tailslow: bool,
    /// Maximum throttle, in percent.
    pub max_cpu_throttle: u8,
    /// Threshold for throttling: dirtied bytes in percent of the sent bytes.
    pub throttle_trigger_threshold: u8,
    /// Dirty limit of each vCPU, in bytes per second.
    pub vcpu_dirty_limit_bytes: u64,
    /// Whether a migration that does not converge fails.
    pub fails: bool,
    /// Whether the downtime limit is ignored after a migration did not converge.
    #[serde(default)]
    pub exceeds_limit: bool,
    /// Whether vCPUs may be throttled (capability `auto-converge`).
    pub auto_converge: bool,
    /// Whether dirty rates may be limited (capability `dirty-limit`).
    pub dirty_limit: bool,
}

impl Default for Settings {
    /// QEMU 11's defaults, except that nothing limits the bandwidth. The guest is not slowed down.
    fn default() -> Self {
        Self {
            max_bandwidth_bytes: 0,
            avail_switchover_bandwidth_bytes: 0,
            downtime_limit: Duration::from_millis(300),
            cpu_throttle_initial: 20,
            cpu_throttle_increment: 10,
            cpu_throttle_tailslow: false,
            max_cpu_throttle: 99,
            throttle_trigger_threshold: 50,
            vcpu_dirty_limit_bytes: 1 << 20,
            fails: false,
            exceeds_limit: false,
            auto_converge: false,
            dirty_limit: false,
        }
    }
}
