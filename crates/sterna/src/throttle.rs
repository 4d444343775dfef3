//! Throttling of a guest: the trait that a VMM implements, and the measured values.

use std::time::Duration;

use crate::error::VmError;

/// Throttles a guest. The engine uses it during a migration, and removes every limit when the migration ends,
/// successfully or not. An operator's limits (`set-vcpu-dirty-limit`) are set while no migration runs.
pub trait Throttle: Send + Sync {
    /// Makes each vCPU sleep so that it runs `100 - percent` percent of the time. `percent` is at most 99; 0 removes
    /// the throttle. Must return quickly, and must not delay a stop of the guest.
    fn set_cpu_throttle(&self, percent: u8);

    /// Whether the VM counts each vCPU's dirty rate, which [`Throttle::set_dirty_limit`] needs (KVM: with a dirty
    /// ring).
    fn can_limit_dirty_rate(&self) -> bool {
        false
    }

    /// Limits the dirty rate of a vCPU (every vCPU for `None`), in bytes per second.
    ///
    /// The limit stays until it is removed with `None`. A VM that counts a vCPU's writes only while a migration or a
    /// measurement tracks them keeps the limit and applies it then.
    ///
    /// # Errors
    /// There is no such vCPU, or dirty rates are not counted.
    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        let _ = (vcpu, bytes_per_second);
        Err(VmError::new(
            "dirty limit",
            "this VM does not count dirty pages per vCPU: start it with a dirty ring",
        ))
    }

    /// Dirty rate of each vCPU, in the vCPUs' order. If dirty rates can be limited, the list always has one entry per
    /// vCPU, with its limit. Otherwise it is empty.
    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        Vec::new()
    }

    /// Effect of dirty limits on the guest. `None` if no limit is set, or if the VM does not measure it.
    fn dirty_limit_times(&self) -> Option<DirtyLimitTimes> {
        None
    }
}

/// Effect of dirty limits on a guest, in terms of KVM's dirty ring of a vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct DirtyLimitTimes {
    /// `dirty-limit-throttle-time-per-round`: time that a vCPU sleeps per full ring, for the vCPU that sleeps
    /// longest.
    #[serde(deserialize_with = "sterna_forecast::time_forms::time")]
    pub throttled_per_round: Duration,
    /// `dirty-limit-ring-full-time`: time in which an average vCPU fills its ring at the present dirty rate. Zero if
    /// no vCPU dirties memory.
    #[serde(deserialize_with = "sterna_forecast::time_forms::time")]
    pub ring_full: Duration,
}

/// Dirty rate and limit of one vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VcpuDirtyRate {
    /// Dirty rate in bytes per second, over about the last second; 0 while writes are not counted.
    pub rate_bytes: u64,
    /// The vCPU's limit, in bytes per second, if one is set.
    pub limit_bytes: Option<u64>,
}
