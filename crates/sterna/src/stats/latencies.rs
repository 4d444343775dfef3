//! Durations of an event that is repeated.

use std::time::Duration;

use sterna_forecast::time_forms::{list, time};

/// Powers of two of microseconds; the last includes all durations over half an hour.
pub(crate) const POWERS: usize = 32;

/// Durations of a repeated event: count, average, percentiles and buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Latencies {
    /// Number of events.
    pub count: u64,
    /// Average duration.
    #[serde(deserialize_with = "time")]
    pub average: Duration,
    /// Median. At most an eighth too large, like all values that are computed from `buckets`.
    #[serde(deserialize_with = "time")]
    pub p50: Duration,
    /// 99th percentile.
    #[serde(deserialize_with = "time")]
    pub p99: Duration,
    /// The longest duration.
    #[serde(deserialize_with = "time")]
    pub longest: Duration,
    /// Upper bound and number of events of each bucket; empty buckets are omitted.
    #[serde(deserialize_with = "list")]
    pub buckets: Vec<(u64, Duration)>,
}
