//! QEMU's rule.
//!
//! A round is a sync of x and then a transfer of t: what was dirtied during both is what is sent, so with a
//! steady load t = D·x/(B−D) and a round lasts x + t = B·x/(B−D). At the decision D·(x+t) bytes remain, and
//! QEMU divides them by the bandwidth that it measured, sync time included:
//!
//! - *Long rounds*, above QEMU's window of 100 ms: it measured B·t/(x+t) = D, so it needs y ≥ B·x/(B−D).
//! - *Short rounds*: within a window x was lost once, it measured B·(1 − x/100 ms), so it needs
//!   y ≥ D·x/(B−D) / (1 − x/100 ms).
//!
//! Each formula counts only where its rounds are. At 100 ms both give 100 ms, so the two make one rising line.
//! QEMU leaves stop, devices and start out of its estimate: the downtime of the guest is longer.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// QEMU takes the bandwidth anew after this time.
pub const WINDOW: Duration = Duration::from_millis(100);

/// Whether a round is longer or shorter than [`WINDOW`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    /// Longer.
    Long,
    /// Shorter.
    Short,
}

/// Which formula counts, and what the other one, out of its place, would say.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Regimes {
    /// Seconds that a round lasts at the load's rate; none if rounds grow without end.
    pub round: Option<f64>,
    /// For the downtime limit needed; none if rounds grow without end.
    pub needed: Option<Regime>,
    /// For the largest dirty rate.
    pub largest: Regime,
    /// The largest dirty rate by the formula for long rounds, bytes per second, whether it counts or not.
    pub largest_by_long: f64,
    /// The same by the formula for short rounds; none if a sync is as long as the window.
    pub largest_by_short: Option<f64>,
}

impl Regimes {
    /// For bandwidth `b`, dirty rate `d` (bytes per second), sync `x` and limit `y`.
    pub fn of(b: f64, d: f64, x: Duration, y: Duration) -> Self {
        let round = round(b, d, x);
        Self {
            round,
            needed: round.map(regime),
            largest: regime(y.as_secs_f64()),
            largest_by_long: largest_by_long(b, x, y),
            largest_by_short: largest_by_short(b, x, y),
        }
    }
}

/// Seconds of downtime limit without which a migration at dirty rate `d` over bandwidth `b` (bytes per second)
/// with syncs of `x` does not end; none if no limit is enough.
pub fn downtime_needed(b: f64, d: f64, x: Duration) -> Option<f64> {
    let round = round(b, d, x)?;
    match regime(round) {
        Regime::Long => Some(round),
        // Rounds below the window have syncs below it: no division by zero.
        Regime::Short => Some((round - x.as_secs_f64()) / window_left(x)),
    }
}

/// The largest dirty rate, bytes per second, that ends within the limit `y`.
pub fn largest_dirty_rate(b: f64, x: Duration, y: Duration) -> f64 {
    // The rate that just ends has rounds as long as the limit if they are long, and shorter ones than the
    // window if the limit is: so the limit alone says which formula is in its place.
    match (regime(y.as_secs_f64()), largest_by_short(b, x, y)) {
        (Regime::Short, Some(rate)) => rate,
        (Regime::Short, None) => 0.0,
        (Regime::Long, _) => largest_by_long(b, x, y),
    }
}

/// Seconds of a round in the steady state.
fn round(b: f64, d: f64, x: Duration) -> Option<f64> {
    (d < b).then(|| b * x.as_secs_f64() / (b - d.max(0.0)))
}

fn regime(round: f64) -> Regime {
    if round >= WINDOW.as_secs_f64() { Regime::Long } else { Regime::Short }
}

fn window_left(x: Duration) -> f64 {
    1.0 - x.as_secs_f64() / WINDOW.as_secs_f64()
}

fn largest_by_long(b: f64, x: Duration, y: Duration) -> f64 {
    if x >= y {
        return if x.is_zero() { b } else { 0.0 };
    }
    b * (1.0 - x.as_secs_f64() / y.as_secs_f64())
}

fn largest_by_short(b: f64, x: Duration, y: Duration) -> Option<f64> {
    if x.is_zero() {
        return Some(b);
    }
    let k = window_left(x) * y.as_secs_f64();
    (x < WINDOW).then(|| b * k / (x.as_secs_f64() + k))
}
