//! Sterna's rule.
//!
//! A look for dirty pages happens while the channels go on with the pass, so a round lasts max(x, D·T/B): with
//! D < B rounds shrink until they are as long as a look. What was dirtied during the last look is left at the
//! stop: D·x bytes. The pause is then stop + last sync + D·x/B + devices + start.

use std::time::Duration;

/// Seconds of downtime limit without which a migration at dirty rate `d` over bandwidth `b` (bytes per second)
/// with syncs of `x` and a fixed pause of `paused` does not end; none if no limit is enough.
pub fn downtime_needed(b: f64, d: f64, x: Duration, paused: Duration) -> Option<f64> {
    (d < b).then(|| paused.as_secs_f64() + x.as_secs_f64() * (1.0 + d.max(0.0) / b))
}

/// The largest dirty rate, bytes per second, that ends within the limit `y`. At the bandwidth itself rounds no
/// longer shrink, so it is never more.
pub fn largest_dirty_rate(b: f64, x: Duration, y: Duration, paused: Duration) -> f64 {
    let (x, room) = (x.as_secs_f64(), y.as_secs_f64() - paused.as_secs_f64());
    if room < x {
        return 0.0;
    }
    if x == 0.0 { b } else { (b * (room - x) / x).min(b) }
}
