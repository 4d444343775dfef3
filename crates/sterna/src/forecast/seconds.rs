//! Durations as seconds: in JSON, and from numbers that may be anything.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

/// Writes seconds.
pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

/// Reads seconds; refuses what is no length of time.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(from)?;
    Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
}

/// Writes seconds, or nothing.
pub(super) fn serialize_optional<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serialize(time, to),
        None => to.serialize_none(),
    }
}

/// Reads seconds, or nothing; refuses what is no length of time.
pub(super) fn deserialize_optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let seconds: Option<f64> = Option::deserialize(from)?;
    seconds.map(Duration::try_from_secs_f64).transpose().map_err(serde::de::Error::custom)
}

/// The nearest length of time: nothing for negative ones and for what is no number, the longest for endless.
pub(crate) fn duration(seconds: f64) -> Duration {
    if seconds.is_nan() || seconds <= 0.0 {
        return Duration::ZERO;
    }
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
