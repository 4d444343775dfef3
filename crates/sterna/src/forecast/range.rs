//! An expected figure and how far it may be off.

use serde::{Deserialize, Serialize};

/// An expected value and its range. `None`: the migration does not end.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Range {
    /// If bandwidth and dirty rate are better than expected.
    pub low: Option<f64>,
    /// With bandwidth and dirty rate as given.
    pub expected: Option<f64>,
    /// If they are worse.
    pub high: Option<f64>,
}

impl Range {
    /// The range of what is known in all three cases, whichever is the least.
    pub(super) fn of(values: [f64; 3]) -> Self {
        let [_, expected, _] = values;
        let [low, high] = [f64::min, f64::max].map(|pick| values.into_iter().reduce(pick));
        Self { low, expected: Some(expected), high }
    }
}
