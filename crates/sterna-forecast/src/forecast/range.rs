//! An expected value with its uncertainty.

use serde::{Deserialize, Serialize};

/// An expected value and its range. `None`: the migration does not end.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Range {
    /// The value if bandwidth and dirty rate are better than expected.
    pub low: Option<f64>,
    /// The value with the given bandwidth and dirty rate.
    pub expected: Option<f64>,
    /// The value if bandwidth and dirty rate are worse than expected.
    pub high: Option<f64>,
}

impl Range {
    /// The range of three known values: better, expected, worse. `low` and `high` are their minimum and maximum.
    pub(super) fn of(values: [f64; 3]) -> Self {
        let [_, expected, _] = values;
        let [low, high] = [f64::min, f64::max].map(|pick| values.into_iter().reduce(pick));
        Self { low, expected: Some(expected), high }
    }
}
