//! The bound of every precopy: if finding dirty pages took no time, rounds would shrink to nothing as long as D < B.
//! The downtime would then be the time of stop, devices and start.

use std::time::Duration;

/// The least downtime limit that is needed, in seconds. None if no limit is enough.
pub fn downtime_needed(b: f64, d: f64, fixed: Duration) -> Option<f64> {
    (d < b).then_some(fixed.as_secs_f64())
}

/// The largest dirty rate, in bytes per second, with which a migration ends within the limit `y`.
pub fn largest_dirty_rate(b: f64, y: Duration, fixed: Duration) -> f64 {
    if y < fixed { 0.0 } else { b }
}
