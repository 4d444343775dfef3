//! Converts durations to and from seconds: in JSON, and from arbitrary floating-point numbers.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

/// Writes a duration as seconds.
pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

/// Reads a duration in seconds. Refuses negative, infinite and NaN values.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(from)?;
    Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
}

/// Writes a duration as seconds, or `null`.
pub(super) fn serialize_optional<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serialize(time, to),
        None => to.serialize_none(),
    }
}

/// Reads a duration in seconds, or `null`. Refuses negative, infinite and NaN values.
pub(super) fn deserialize_optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let seconds: Option<f64> = Option::deserialize(from)?;
    seconds.map(Duration::try_from_secs_f64).transpose().map_err(serde::de::Error::custom)
}

/// Converts any number of seconds. Negative values and NaN become 0, and values that are too large become the
/// maximum.
pub(crate) fn duration(seconds: f64) -> Duration {
    if seconds.is_nan() || seconds <= 0.0 {
        return Duration::ZERO;
    }
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
