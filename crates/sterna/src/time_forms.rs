//! Reads lengths of time in both forms that there are in JSON: serde's own object of seconds and nanoseconds, which is
//! what these types write, and a number of seconds, which stands in records of migrations.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Either form.
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

/// A length of time.
pub(crate) fn time<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    Either::deserialize(from)?.duration()
}

/// One that need not be known.
pub(crate) fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    Option::<Either>::deserialize(from)?.map(Either::duration).transpose()
}

/// Some.
pub(crate) fn times<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Duration>, D::Error> {
    Vec::<Either>::deserialize(from)?.into_iter().map(Either::duration).collect()
}

/// Some, each with what it is of.
pub(crate) fn list<'de, D, T>(from: D) -> Result<Vec<(T, Duration)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Vec::<(T, Either)>::deserialize(from)?;
    list.into_iter().map(|(of, time)| Ok((of, time.duration()?))).collect()
}
