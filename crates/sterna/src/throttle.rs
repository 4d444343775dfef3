//! What a VMM implements so that the engine can throttle a guest.

use std::time::Duration;

use crate::error::VmError;

/// Throttles a guest. The engine uses it during a migration and removes every limit when the migration ends, however it
/// ends. An operator's limits (`set-vcpu-dirty-limit`) are set while no migration runs.
pub trait Throttle: Send + Sync {
    /// Each vCPU sleeps so that it runs `100 - percent` of the time, at most 99; 0 removes the throttle. Must return
    /// soon, and must not delay a stop of the guest.
    fn set_cpu_throttle(&self, percent: u8);

    /// Whether the VM counts what each vCPU dirties, so that [`Throttle::set_dirty_limit`] can work (KVM: with a
    /// dirty ring).
    fn can_limit_dirty_rate(&self) -> bool {
        false
    }

    /// Limits what a vCPU (or every vCPU, if none is named) may dirty, in bytes per second; `None` removes the limit, which
    /// otherwise stays. A VM that counts a vCPU's writes only while a migration or a measurement tracks them keeps the
    /// limit and applies it then.
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

    /// What each vCPU dirties, in the vCPUs' order. If dirty rates can be limited, the list always has one entry per vCPU,
    /// with its limit. Otherwise it is empty.
    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        Vec::new()
    }

    /// What dirty limits do to the guest; `None` if none is set, or if the VM does not count it.
    fn dirty_limit_times(&self) -> Option<DirtyLimitTimes> {
        None
    }
}

/// What dirty limits do to a guest, in terms of the ring in which KVM reports what a vCPU dirties.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct DirtyLimitTimes {
    /// `dirty-limit-throttle-time-per-round`: how long a vCPU sleeps for every ring that it fills; of the vCPU that sleeps
    /// longest.
    #[serde(deserialize_with = "crate::time_forms::time")]
    pub throttled_per_round: Duration,
    /// `dirty-limit-ring-full-time`: how long an average vCPU takes to fill a ring at the rate at which it dirties now;
    /// nothing where none dirties.
    #[serde(deserialize_with = "crate::time_forms::time")]
    pub ring_full: Duration,
}

/// What one vCPU dirties.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VcpuDirtyRate {
    /// Bytes per second, over the last second or so; 0 while nothing is counted.
    pub rate_bytes: u64,
    /// The limit that was set, bytes per second.
    pub limit_bytes: Option<u64>,
}
