//! Sterna's rule.
//!
//! The channels continue to send during a sync, so a round lasts max(x, D·T/B). With D < B, rounds shrink until they
//! are as long as a sync. The pages dirtied during the last sync remain at the stop: D·x bytes. The downtime is then
//! stop + last sync + D·x/B + devices + start.
//!
//! This is the least that the method needs. In addition the engine keeps a margin, and sends the data in sockets
//! before the remaining pages ([`DowntimeEstimate`]). [`limit_that_fits`] and [`largest_that_fits`] include both. The
//! engine stops the guest by these.

use std::time::Duration;

use crate::forecast::simulate::QUEUED_BYTES;
use crate::precopy::{DowntimeEstimate, MARGIN, allowed};

/// The least downtime limit, in seconds, with which a migration ends. None if no limit is enough.
/// `b`: bandwidth, `d`: dirty rate, both in bytes per second. `x`: duration of a sync. `fixed`: fixed costs.
pub fn downtime_needed(b: f64, d: f64, x: Duration, fixed: Duration) -> Option<f64> {
    (d < b).then(|| fixed.as_secs_f64() + x.as_secs_f64() * (1.0 + d.max(0.0) / b))
}

/// The largest dirty rate, in bytes per second, with which a migration ends within the limit `y`. It is at most the
/// bandwidth, at which rounds no longer shrink.
pub fn largest_dirty_rate(b: f64, x: Duration, y: Duration, fixed: Duration) -> f64 {
    let (x, room) = (x.as_secs_f64(), y.as_secs_f64() - fixed.as_secs_f64());
    if room < x {
        return 0.0;
    }
    if x == 0.0 { b } else { (b * (room - x) / x).min(b) }
}

/// Computes [`downtime_needed`] by the engine's behaviour: a sync begins in the middle of a round. So a round lasts
/// x / (1 − D/2B), and the sync finds the pages dirtied in that time.
pub fn limit_that_fits(b: f64, d: f64, x: Duration, fixed: Duration) -> Option<f64> {
    let (sync, share) = (x.as_secs_f64(), d.max(0.0) / b);
    let remaining = share * sync / (1.0 - share / 2.0) + QUEUED_BYTES / b;
    (d < b).then(|| {
        DowntimeEstimate { fixed: fixed.as_secs_f64(), sync, remaining, margin: MARGIN }.least_limit()
    })
}

/// Computes [`largest_dirty_rate`] by the engine's behaviour.
pub fn largest_that_fits(b: f64, x: Duration, y: Duration, fixed: Duration) -> f64 {
    let x = x.as_secs_f64();
    let room = allowed(y.as_secs_f64(), fixed.as_secs_f64()) / (1.0 + MARGIN) - x - QUEUED_BYTES / b;
    if room < 0.0 {
        return 0.0;
    }
    (b * room / (x + room / 2.0)).min(b)
}
