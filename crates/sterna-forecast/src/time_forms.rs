//! Reads durations in both of their JSON forms. These types write serde's object of seconds and nanoseconds. Records
//! of migrations contain a number of seconds.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// A duration in either form.
#[derive(Deserialize)]
#[serde(untagged)]
enum Either {
    Seconds(f64),
    Duration(Duration),
}

impl Either {
    fn duration<E: serde::de::Error>(self) -> Result<Duration, E> {
        match self {
            Self::Seconds(seconds) => Duration::try_from_secs_f64(seconds)
                .map_err(|why| E::custom(format!("{seconds} is not a time in seconds: {why}"))),
            Self::Duration(time) => Ok(time),
        }
    }
}

/// Reads a duration.
pub fn time<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    Either::deserialize(from)?.duration()
}

/// Reads a duration or `null`.
pub fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    Option::<Either>::deserialize(from)?.map(Either::duration).transpose()
}

/// Reads a list of durations.
pub fn times<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Duration>, D::Error> {
    Vec::<Either>::deserialize(from)?.into_iter().map(Either::duration).collect()
}

/// Reads a list of pairs of a value and its duration.
pub fn list<'de, D, T>(from: D) -> Result<Vec<(T, Duration)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Vec::<(T, Either)>::deserialize(from)?;
    list.into_iter().map(|(of, time)| Ok((of, time.duration()?))).collect()
}
