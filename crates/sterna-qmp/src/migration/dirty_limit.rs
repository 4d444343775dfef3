//! Commands that limit the dirty rates of vCPUs: `set-vcpu-dirty-limit` and related ones, with QEMU's answers
//! (specs/stream.md §8.1). They need a VM that counts the dirty pages of each vCPU, for example with a dirty ring.
//!
//! QEMU tracks the guest's writes as long as there is a limit. Here a VM may track them only during a migration or a
//! measurement (the KVM machine does). A limit can be set and queried at any time, and slows the vCPU down while
//! writes are tracked.

use serde_json::{Map, Value, json};
use sterna::throttle::Throttle;

use crate::error::QmpError;

const MEGABYTE: u64 = 1 << 20;

/// QEMU's refusal, with the advice to use a dirty ring.
pub(super) const NEEDS_RING: &str = "dirty page limit feature requires KVM with accelerator property 'dirty-ring-size' set: \
     start the VM with a dirty ring";

/// The VM's throttle, if it can limit dirty rates.
pub(super) fn limiter(throttle: Option<&dyn Throttle>) -> Option<&dyn Throttle> {
    throttle.filter(|throttle| throttle.can_limit_dirty_rate())
}

/// Executes `set-vcpu-dirty-limit`.
pub(super) fn set(throttle: Option<&dyn Throttle>, arguments: &Map<String, Value>) -> Result<(), QmpError> {
    let throttle = limiter(throttle).ok_or_else(|| QmpError::generic(NEEDS_RING))?;
    let vcpu = vcpu(throttle, arguments)?;
    let megabytes = arguments.get("dirty-rate").and_then(Value::as_u64).filter(|rate| *rate > 0);
    let megabytes = megabytes.ok_or_else(|| {
        QmpError::expects("dirty-rate", "MB/s above 0; 'cancel-vcpu-dirty-limit' removes a limit")
    })?;
    throttle
        .set_dirty_limit(vcpu, Some(megabytes.saturating_mul(MEGABYTE)))
        .map_err(|error| QmpError::generic(error.to_string()))
}

/// Executes `cancel-vcpu-dirty-limit`. Without a dirty ring there is no limit to cancel.
pub(super) fn cancel(
    throttle: Option<&dyn Throttle>,
    arguments: &Map<String, Value>,
) -> Result<(), QmpError> {
    let Some(throttle) = limiter(throttle) else { return Ok(()) };
    let vcpu = vcpu(throttle, arguments)?;
    throttle.set_dirty_limit(vcpu, None).map_err(|error| QmpError::generic(error.to_string()))
}

/// Answers `query-vcpu-dirty-limit` with every vCPU that has a limit.
pub(super) fn query(throttle: Option<&dyn Throttle>) -> Value {
    let rates = limiter(throttle).map(|throttle| throttle.vcpu_dirty_rates()).unwrap_or_default();
    let limited = rates.into_iter().enumerate().filter_map(|(index, vcpu)| {
        let limit = vcpu.limit_bytes?;
        Some(json!({
            "cpu-index": index,
            "limit-rate": limit / MEGABYTE,
            "current-rate": vcpu.rate_bytes / MEGABYTE,
        }))
    });
    limited.collect()
}

fn vcpu(throttle: &dyn Throttle, arguments: &Map<String, Value>) -> Result<Option<usize>, QmpError> {
    let Some(index) = arguments.get("cpu-index") else { return Ok(None) };
    let known = throttle.vcpu_dirty_rates().len();
    let index = index.as_u64().and_then(|index| usize::try_from(index).ok()).filter(|index| *index < known);
    index
        .map(Some)
        .ok_or_else(|| QmpError::generic(format!("incorrect cpu index specified: this VM has {known} vCPUs")))
}
