//! How a migration will go, computed before it begins. Pure: no I/O, no clock, no live VM.
//!
//! # The model
//! A guest dirties pages while a pass over its RAM is sent; what it dirtied is the next pass. Passes shrink as
//! long as the channels carry more than the guest dirties *anew* in the same time, which for most guests grows
//! more slowly than time: a page written twice counts once. So the guest is described by how many distinct
//! bytes it dirties in an interval ([`DirtyModel`]), not by one rate.
//!
//! - [`rules`]: closed formulas for a constant rate: which downtime limit is needed, which dirty rate still
//!   converges, by QEMU's way of estimating, by Sterna's, and by physics.
//! - [`dirty`], [`fit`]: the guest, described or measured.
//! - [`Pause`]: whether the rest fits the pause, as the engine decides it.
//! - [`simulate`]: pass by pass until the rest fits the limit, or until passes no longer shrink.
//! - [`Forecast`]: that for the expected figures, and for figures that are off by [`Inputs::uncertainty`] in
//!   both directions; with [`Advice`] where it would not end.
//!
//! Bandwidth is that of moving bytes, as everywhere in Sterna: time that goes into looking for dirty pages
//! ([`Inputs::sync`]) is counted apart, and happens while the channels carry on.

mod advice;
pub mod dirty;
pub mod fit;
pub mod rules;
mod seconds;
pub mod simulate;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use crate::precopy::{FIXED_PAUSE, MARGIN, Pause};
pub use advice::Advice;
pub use dirty::{Class, DirtyModel, Order, Point};
pub use simulate::{Luck, PlannedRound, Run, Walk};

use crate::ram::PAGE_SIZE;

/// Bytes of a page, as a factor.
pub(crate) const PAGE_BYTES: f64 = PAGE_SIZE as f64;

/// All that a forecast is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// RAM of the guest, bytes.
    pub ram_bytes: u64,
    /// What the first pass has to send, bytes: RAM without the pages that are zero or were never touched, which
    /// cost next to nothing.
    pub first_pass_bytes: u64,
    /// Bytes per second while bytes move and the guest runs, over all channels: what the link and `max-bandwidth`
    /// leave.
    pub bandwidth_bytes: u64,
    /// The same while the guest stands still, when `max-bandwidth` holds nobody back; none: no more than before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_bandwidth_bytes: Option<u64>,
    /// `avail-switchover-bandwidth`: with what the engine reckons the pause before it stops the guest; none: with what
    /// it measures while the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avail_switchover_bandwidth_bytes: Option<u64>,
    /// How the guest writes.
    pub dirty: DirtyModel,
    /// How long one look for dirty pages takes, seconds in JSON.
    #[serde(with = "seconds")]
    pub sync: Duration,
    /// The pause that the guest may suffer, seconds in JSON.
    #[serde(with = "seconds")]
    pub downtime_limit: Duration,
    /// What each migration costs, whatever the guest writes.
    #[serde(default)]
    pub fixed: Fixed,
    /// By which part bandwidth and dirty rate may be wrong: 0.1 for ten per cent. Above 0.9 counts as 0.9.
    #[serde(default = "default_uncertainty")]
    pub uncertainty: f64,
}

impl Inputs {
    /// The uncertainty, whatever was written there.
    fn sane_uncertainty(&self) -> f64 {
        if self.uncertainty.is_finite() { self.uncertainty.clamp(0.0, 0.9) } else { 0.0 }
    }
}

/// The uncertainty to take where nobody knows better.
pub const UNCERTAINTY: f64 = 0.1;

fn default_uncertainty() -> f64 {
    UNCERTAINTY
}

/// Times that do not depend on what the guest writes; seconds in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fixed {
    /// Connecting and exchanging headers; the guest runs.
    #[serde(with = "seconds")]
    pub setup: Duration,
    /// vCPUs stop, hooks release.
    #[serde(with = "seconds")]
    pub stop: Duration,
    /// Devices are saved, sent, loaded.
    #[serde(with = "seconds")]
    pub devices: Duration,
    /// The destination starts the guest.
    #[serde(with = "seconds")]
    pub start: Duration,
}

impl Fixed {
    /// The part of it for which the guest stands still.
    pub fn paused(&self) -> Duration {
        self.stop.saturating_add(self.devices).saturating_add(self.start)
    }
}

/// A figure and how far it may be off. Nothing stands for a migration that does not end.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Range {
    /// If bandwidth and dirty rate are better than expected.
    pub low: Option<f64>,
    /// With the figures as they were given.
    pub expected: Option<f64>,
    /// If they are worse.
    pub high: Option<f64>,
}

/// How a migration will go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Whether it ends by itself, with the figures as they were given.
    pub convergent: bool,
    /// Whether it also ends if the figures are wrong by [`Inputs::uncertainty`].
    pub certain: bool,
    /// Passes until the guest stops.
    pub rounds: Range,
    /// Seconds from the start until the guest runs at the destination.
    pub total_time: Range,
    /// Seconds for which the guest stands still.
    pub downtime: Range,
    /// Bytes sent in all.
    pub bytes: Range,
    /// The shortest pause that can be reached at all, seconds: what `downtime-limit` must allow at least.
    pub least_downtime: f64,
    /// The passes that are expected; the first few hundred.
    pub curve: Vec<PlannedRound>,
    /// What to change, the mildest first. Empty if nothing has to change.
    pub advice: Vec<Advice>,
}

impl Forecast {
    /// Computes it.
    pub fn new(inputs: &Inputs) -> Self {
        let off = inputs.sane_uncertainty();
        let expected = simulate::run(inputs, Luck::EXPECTED);
        let low = simulate::run(inputs, Luck::better(off));
        let high = simulate::run(inputs, Luck::worse(off));
        let range = |figure: &dyn Fn(&Run) -> f64| {
            let of = |run: &Run| run.convergent.then(|| figure(run));
            // Fewer and longer rounds can end sooner than many short ones, by a little: a range is in order.
            let (low, expected, high) = (of(&low), of(&expected), of(&high));
            let least = [low, expected, high].into_iter().flatten().reduce(f64::min);
            let greatest = [low, expected, high].into_iter().flatten().reduce(f64::max);
            Range { low: low.and(least), expected, high: high.and(greatest) }
        };
        let advice = if high.convergent { Vec::new() } else { advice::advise(inputs, &expected) };
        Self {
            convergent: expected.convergent,
            certain: high.convergent,
            rounds: range(&|run| run.rounds as f64),
            total_time: range(&|run| run.total_time),
            downtime: range(&|run| run.downtime),
            bytes: range(&|run| run.bytes),
            least_downtime: expected.least_downtime,
            curve: expected.curve,
            advice,
        }
    }
}

#[cfg(test)]
mod tests;
