//! QEMU's rule.
//!
//! A round is a sync of x and then a transfer of t. It sends the pages that were dirtied during the previous round. So
//! with a steady load t = D·x/(B−D), and a round lasts x + t = B·x/(B−D). At the decision D·(x+t) bytes remain. QEMU
//! divides them by its measured bandwidth, which includes the sync time:
//!
//! - *Long rounds*, above QEMU's window of 100 ms: it measured B·t/(x+t) = D, so it needs y ≥ B·x/(B−D).
//! - *Short rounds*: a window contains x once, it measured B·(1 − x/100 ms), so it needs y ≥ D·x/(B−D) / (1 − x/100
//!   ms).
//!
//! Each formula applies only to its own rounds. At 100 ms both give 100 ms, so together they are one rising curve.
//! QEMU's estimate does not include stop, devices and start, so the guest's downtime is longer.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// QEMU measures the bandwidth over windows of this length.
pub const WINDOW: Duration = Duration::from_millis(100);

/// Whether a round is longer or shorter than [`WINDOW`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    /// The round is longer than the window.
    Long,
    /// The round is shorter than the window.
    Short,
}

/// The formulas that apply, and the results of both.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Regimes {
    /// Duration of a round at the load's rate, in seconds. None if rounds grow without a limit.
    pub round: Option<f64>,
    /// The regime for the downtime limit that is needed. None if rounds grow without a limit.
    pub needed: Option<Regime>,
    /// The regime for the largest dirty rate.
    pub largest: Regime,
    /// The largest dirty rate by the formula for long rounds, even if it does not apply. In bytes per second.
    pub largest_by_long: f64,
    /// The same by the formula for short rounds. None if a sync is as long as the window.
    pub largest_by_short: Option<f64>,
}

impl Regimes {
    /// Computes the regimes for bandwidth `b`, dirty rate `d` (bytes per second), sync `x` and limit `y`.
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

/// The least downtime limit, in seconds, with which a migration ends. None if no limit is enough.
/// `b`: bandwidth, `d`: dirty rate, both in bytes per second. `x`: duration of a sync.
pub fn downtime_needed(b: f64, d: f64, x: Duration) -> Option<f64> {
    let round = round(b, d, x)?;
    match regime(round) {
        Regime::Long => Some(round),
        // Rounds shorter than the window have syncs shorter than the window, so this cannot divide by zero.
        Regime::Short => Some((round - x.as_secs_f64()) / window_left(x)),
    }
}

/// The largest dirty rate, in bytes per second, with which a migration ends within the limit `y`.
pub fn largest_dirty_rate(b: f64, x: Duration, y: Duration) -> f64 {
    // The rate that just ends has rounds as long as the limit if they are long. If the limit is below the window, the
    // rounds are too. So the limit alone decides which formula applies.
    match (regime(y.as_secs_f64()), largest_by_short(b, x, y)) {
        (Regime::Short, Some(rate)) => rate,
        (Regime::Short, None) => 0.0,
        (Regime::Long, _) => largest_by_long(b, x, y),
    }
}

/// Duration of a round in the steady state, in seconds. None if there is no steady state.
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
