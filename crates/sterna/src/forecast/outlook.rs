//! How a migration will go.

use serde::{Deserialize, Serialize};

use super::advice::{self, Advice};
use super::inputs::Inputs;
use super::postcopy::PostcopyForecast;
use super::range::Range;
use super::simulate::{self, Luck, PlannedRound, Run};

/// How a migration will go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Whether it ends by itself, with bandwidth and dirty rate as given.
    pub convergent: bool,
    /// Whether it also ends if these are wrong by [`Inputs::uncertainty`].
    pub certain: bool,
    /// Rounds until the guest stops.
    pub rounds: Range,
    /// Seconds from the start until the guest runs at the destination.
    pub total_time: Range,
    /// Seconds in which the guest runs on neither side.
    pub downtime: Range,
    /// Bytes sent in all.
    pub bytes: Range,
    /// The shortest downtime that can be reached at all, seconds: what `downtime-limit` must allow at least.
    pub least_downtime: f64,
    /// The rounds that are expected; the first few hundred.
    pub curve: Vec<PlannedRound>,
    /// What postcopy would do; none if it cannot be used ([`PostcopyInputs::excluded`](super::PostcopyInputs::excluded)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyForecast>,
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
        let range = |value: &dyn Fn(&Run) -> f64| {
            let of = |run: &Run| run.convergent.then(|| value(run));
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
