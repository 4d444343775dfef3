//! Closed formulas for a guest that dirties memory at a constant rate.
//!
//! B is the bandwidth while bytes move, D the dirty rate, x the time of one sync, y the downtime limit. Each
//! rule answers two questions: the least y with which a migration at D ends, and the largest D that ends with y.
//!
//! - [`qemu`]: sync and sending take turns, and sync time counts as transfer time, so that the bandwidth that
//!   QEMU believes in is too low just when it matters.
//! - [`sterna`]: sync overlaps sending and is counted apart; without and with what the engine keeps free.
//! - [`physics`]: what no precopy can beat, if finding dirty pages took no time at all.

pub mod physics;
pub mod qemu;
pub mod sterna;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::inputs::Inputs;

/// B, D, x, y, and the fixed costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// B, bytes per second.
    pub bandwidth_bytes: f64,
    /// D, bytes per second.
    pub dirty_bytes: f64,
    /// x.
    pub sync: Duration,
    /// y.
    pub downtime_limit: Duration,
    /// Stop, devices and start together.
    pub fixed: Duration,
}

impl Load {
    /// The load that `inputs` describe. D is the rate over an interval as long as the downtime limit (at least
    /// QEMU's window): rounds have about that length when it is decided whether they end.
    pub fn of(inputs: &Inputs) -> Self {
        let over = inputs.downtime_limit.max(qemu::WINDOW);
        Self {
            bandwidth_bytes: inputs.bandwidth_bytes as f64,
            dirty_bytes: inputs.dirty.distinct_bytes(over, inputs.ram_bytes) / over.as_secs_f64(),
            sync: inputs.sync,
            downtime_limit: inputs.downtime_limit,
            fixed: inputs.fixed.downtime(),
        }
    }
}

/// What one rule says.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Verdict {
    /// Seconds that the downtime limit must allow at the load's dirty rate; none: no limit is enough.
    pub downtime_needed: Option<f64>,
    /// The largest dirty rate that converges within the load's limit, bytes per second.
    pub largest_dirty_bytes: f64,
    /// Whether the load converges.
    pub converges: bool,
}

impl Verdict {
    fn new(load: &Load, needed: Option<f64>, largest: f64) -> Self {
        let converges = needed.is_some_and(|needed| needed <= load.downtime_limit.as_secs_f64());
        Self { downtime_needed: needed, largest_dirty_bytes: largest, converges }
    }
}

/// The rules side by side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The constant rate that they were asked about, bytes per second.
    pub dirty_bytes: f64,
    /// QEMU's.
    pub qemu: Verdict,
    /// Which of QEMU's formulas counts for the rate, and which for the limit.
    pub qemu_regimes: qemu::Regimes,
    /// Sterna's.
    pub sterna: Verdict,
    /// Sterna's with the engine's margin and what sockets hold: by this a guest is stopped.
    #[serde(default)]
    pub engine: Verdict,
    /// Physics'.
    pub physics: Verdict,
}

impl Comparison {
    /// Asks all.
    pub fn new(load: &Load) -> Self {
        let Load { bandwidth_bytes: b, dirty_bytes: d, sync: x, downtime_limit: y, fixed } = *load;
        let verdict = |needed, largest| Verdict::new(load, needed, largest);
        Self {
            dirty_bytes: d,
            qemu: verdict(qemu::downtime_needed(b, d, x), qemu::largest_dirty_rate(b, x, y)),
            qemu_regimes: qemu::Regimes::of(b, d, x, y),
            sterna: verdict(
                sterna::downtime_needed(b, d, x, fixed),
                sterna::largest_dirty_rate(b, x, y, fixed),
            ),
            engine: verdict(
                sterna::limit_that_fits(b, d, x, fixed),
                sterna::largest_that_fits(b, x, y, fixed),
            ),
            physics: verdict(physics::downtime_needed(b, d, fixed), physics::largest_dirty_rate(b, y, fixed)),
        }
    }
}
