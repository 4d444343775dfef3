//! The result of a forecast.

use serde::{Deserialize, Serialize};

use super::advice::{self, Advice};
use super::inputs::Inputs;
use super::postcopy::PostcopyForecast;
use super::range::Range;
use super::simulate::{self, Luck, PlannedRound, Run};

/// The expected course of a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Whether the migration ends by itself with the given bandwidth and dirty rate.
    pub convergent: bool,
    /// Whether it also ends if these are wrong by [`Inputs::uncertainty`].
    pub certain: bool,
    /// Number of rounds until the guest is stopped.
    pub rounds: Range,
    /// Seconds from the start until the guest runs at the destination.
    pub total_time: Range,
    /// Seconds in which the guest runs on neither side.
    pub downtime: Range,
    /// Total of the bytes sent.
    pub bytes: Range,
    /// The shortest possible downtime, in seconds. `downtime-limit` must be at least this.
    pub least_downtime: f64,
    /// The expected rounds; only the first few hundred.
    pub curve: Vec<PlannedRound>,
    /// The effect of postcopy. None if it cannot be used
    /// ([`PostcopyInputs::excluded`](super::PostcopyInputs::excluded)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyForecast>,
    /// Proposed changes, the mildest first. Empty if no change is needed.
    pub advice: Vec<Advice>,
}

impl Forecast {
    /// Computes the forecast.
    pub fn new(inputs: &Inputs) -> Self {
        let off = inputs.sane_uncertainty();
        let expected = simulate::run(inputs, Luck::EXPECTED);
        let low = simulate::run(inputs, Luck::better(off));
        let high = simulate::run(inputs, Luck::worse(off));
        let range = |value: &dyn Fn(&Run) -> f64| {
            let of = |run: &Run| run.convergent.then(|| value(run));
            // Fewer and longer rounds can end slightly sooner than many short ones. So sort the three values into a
            // range.
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
            postcopy: inputs
                .postcopy
                .excluded
                .is_none()
                .then(|| PostcopyForecast::new(inputs, expected.convergent.then_some(expected.total_time))),
            curve: expected.curve,
            advice,
        }
    }
}
