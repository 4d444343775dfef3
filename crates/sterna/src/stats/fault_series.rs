//! Page faults over time.

use std::time::Duration;

use sterna_forecast::time_forms::time;

/// Page faults over time. The number of parts is bounded; as time passes, the parts become longer.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct FaultSeries {
    /// Begin of the first part. At a source, time since the migration began; at a destination 0.
    #[serde(deserialize_with = "time")]
    pub began: Duration,
    /// Duration of each part.
    #[serde(deserialize_with = "time")]
    pub part: Duration,
    /// Page faults in each part, up to the last part that has one.
    pub counts: Vec<u64>,
}
