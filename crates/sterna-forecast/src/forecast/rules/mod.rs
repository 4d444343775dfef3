//! Closed formulas for a guest that dirties memory at a constant rate.
//!
//! B is the bandwidth while bytes move, D the dirty rate, x the time of one sync, y the downtime limit. Each rule
//! answers two questions: the least y with which a migration at D ends, and the largest D that ends with y.
//!
//! - [`qemu`]: sync and sending alternate, and sync time counts as transfer time. So QEMU's measured bandwidth is too
//!   low for a guest that is close to the limit.
//! - [`sterna`]: sync overlaps sending and is counted separately. Computed with and without the engine's margin.
//! - [`physics`]: the bound of every precopy, as if finding dirty pages took no time.

pub mod physics;
pub mod qemu;
pub mod sterna;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::inputs::Inputs;

/// B, D, x, y, and the fixed costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// B, in bytes per second.
    pub bandwidth_bytes: f64,
    /// D, in bytes per second.
    pub dirty_bytes: f64,
    /// x, the duration of one sync.
    pub sync: Duration,
    /// y, the parameter `downtime-limit`.
    pub downtime_limit: Duration,
    /// Total time of stop, devices and start.
    pub fixed: Duration,
}

impl Load {
    /// The load that corresponds to `inputs`. D is the rate over an interval as long as the downtime limit, at least
    /// QEMU's window. Rounds have about this length when the migration can end.
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

/// The answer of one rule.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The downtime limit that is needed at the load's dirty rate, in seconds. None: no limit is enough.
    pub downtime_needed: Option<f64>,
    /// The largest dirty rate that converges with the load's limit, in bytes per second.
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

/// The answers of all rules for one load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The load's constant dirty rate, in bytes per second.
    pub dirty_bytes: f64,
    /// The answer by QEMU's rule.
    pub qemu: Verdict,
    /// The formulas of QEMU's rule that apply.
    pub qemu_regimes: qemu::Regimes,
    /// The answer by Sterna's rule.
    pub sterna: Verdict,
    /// Sterna's rule with the engine's margin and the data in sockets. The engine stops a guest by this rule.
    #[serde(default)]
    pub engine: Verdict,
    /// The answer of the physical bound.
    pub physics: Verdict,
}

impl Comparison {
    /// Applies all rules to `load`.
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
