//! What an operator has set, as far as the policy uses it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::params::{Capabilities, NonConvergence, Parameters};

/// The part of [`Parameters`] and [`Capabilities`] that decides. All of it may change while a migration runs, but for
/// the two capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Bytes per second while the guest runs; 0: no limit.
    pub max_bandwidth_bytes: u64,
    /// Bytes per second that the switchover is estimated at; 0: as measured.
    pub avail_switchover_bandwidth_bytes: u64,
    /// The longest downtime.
    pub downtime_limit: Duration,
    /// Percent.
    pub cpu_throttle_initial: u8,
    /// Percent.
    pub cpu_throttle_increment: u8,
    /// Whether steps become smaller near the threshold.
    pub cpu_throttle_tailslow: bool,
    /// Percent.
    pub max_cpu_throttle: u8,
    /// Percent of what was sent.
    pub throttle_trigger_threshold: u8,
    /// Bytes per second and vCPU.
    pub vcpu_dirty_limit_bytes: u64,
    /// Whether a migration fails that does not converge.
    pub fails: bool,
    /// Whether the limit no longer counts when a migration does not converge.
    #[serde(default)]
    pub exceeds_limit: bool,
    /// Whether vCPUs may be throttled.
    pub auto_converge: bool,
    /// Whether dirty rates may be limited.
    pub dirty_limit: bool,
}

impl Settings {
    /// As an operator has set them.
    pub(crate) fn new(params: &Parameters, capabilities: &Capabilities) -> Self {
        Self {
            max_bandwidth_bytes: params.max_bandwidth_bytes,
            avail_switchover_bandwidth_bytes: params.avail_switchover_bandwidth_bytes,
            downtime_limit: params.downtime_limit,
            cpu_throttle_initial: params.cpu_throttle_initial,
            cpu_throttle_increment: params.cpu_throttle_increment,
            cpu_throttle_tailslow: params.cpu_throttle_tailslow,
            max_cpu_throttle: params.max_cpu_throttle,
            throttle_trigger_threshold: params.throttle_trigger_threshold,
            vcpu_dirty_limit_bytes: params.vcpu_dirty_limit_bytes,
            // Who performs it knows what follows: the end, or postcopy.
            fails: matches!(params.non_convergence, NonConvergence::Fail | NonConvergence::Postcopy),
            exceeds_limit: params.non_convergence == NonConvergence::Switchover,
            auto_converge: capabilities.auto_converge,
            dirty_limit: capabilities.dirty_limit,
        }
    }
}
