//! Sterna's rule.
//!
//! A sync runs while the channels go on with the round, so a round lasts max(x, D·T/B): with
//! D < B rounds shrink until they are as long as a sync. What was dirtied during the last sync remains at the
//! stop: D·x bytes. The downtime is then stop + last sync + D·x/B + devices + start.
//!
//! This is the least that the method needs. The engine also keeps a margin, and what sockets hold is sent with the
//! remaining pages ([`DowntimeEstimate`]). [`limit_that_fits`] and [`largest_that_fits`] include both; the engine stops
//! the guest by these.

use std::time::Duration;

use crate::forecast::simulate::QUEUED_BYTES;
use crate::precopy::{DowntimeEstimate, MARGIN, allowed};

/// Seconds of downtime limit without which a migration at dirty rate `d` over bandwidth `b` (bytes per second)
/// with syncs of `x` and fixed costs of `fixed` does not end; none if no limit is enough.
pub fn downtime_needed(b: f64, d: f64, x: Duration, fixed: Duration) -> Option<f64> {
    (d < b).then(|| fixed.as_secs_f64() + x.as_secs_f64() * (1.0 + d.max(0.0) / b))
}

/// The largest dirty rate, bytes per second, that ends within the limit `y`. At the bandwidth itself rounds no
/// longer shrink, so it is never more.
pub fn largest_dirty_rate(b: f64, x: Duration, y: Duration, fixed: Duration) -> f64 {
    let (x, room) = (x.as_secs_f64(), y.as_secs_f64() - fixed.as_secs_f64());
    if room < x {
        return 0.0;
    }
    if x == 0.0 { b } else { (b * (room - x) / x).min(b) }
}

/// As [`downtime_needed`], by what the engine does: a sync begins in the middle of a round, so that a round lasts
/// x / (1 − D/2B), and D times as much is found.
pub fn limit_that_fits(b: f64, d: f64, x: Duration, fixed: Duration) -> Option<f64> {
    let (sync, share) = (x.as_secs_f64(), d.max(0.0) / b);
    let remaining = share * sync / (1.0 - share / 2.0) + QUEUED_BYTES / b;
    (d < b).then(|| {
        DowntimeEstimate { fixed: fixed.as_secs_f64(), sync, remaining, margin: MARGIN }.least_limit()
    })
}

/// As [`largest_dirty_rate`], by what the engine does.
pub fn largest_that_fits(b: f64, x: Duration, y: Duration, fixed: Duration) -> f64 {
    let x = x.as_secs_f64();
    let room = allowed(y.as_secs_f64(), fixed.as_secs_f64()) / (1.0 + MARGIN) - x - QUEUED_BYTES / b;
    if room < 0.0 {
        return 0.0;
    }
    (b * room / (x + room / 2.0)).min(b)
}
