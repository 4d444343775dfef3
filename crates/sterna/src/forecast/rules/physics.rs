//! What no precopy can beat: if dirty pages were found in no time, rounds would shrink to nothing as long as
//! D < B, and the downtime would be what stopping, devices and starting take.

use std::time::Duration;

/// Seconds of downtime limit that are needed at least; none if no limit is enough.
pub fn downtime_needed(b: f64, d: f64, fixed: Duration) -> Option<f64> {
    (d < b).then_some(fixed.as_secs_f64())
}

/// The largest dirty rate, bytes per second, that can end within the limit `y`.
pub fn largest_dirty_rate(b: f64, y: Duration, fixed: Duration) -> f64 {
    if y < fixed { 0.0 } else { b }
}
