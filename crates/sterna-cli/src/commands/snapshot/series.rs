//! The images of one series in a store: names by time, and the removal of old ones.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sterna_image::convert::{ConvertOptions, FrameOptions, Input, Output, convert};
use sterna_image::{Access, Format, ImagePlace, Key};

use crate::exit::Stop;

/// The images of a store whose names are times, after an optional prefix.
pub(super) struct Series {
    address: String,
    prefix: String,
    key: Option<Key>,
}

impl Series {
    /// Takes `store:DIRECTORY` or `s3://BUCKET/PREFIX`, or either with `#PREFIX`. Opens nothing.
    pub(super) fn parse(text: &str, key: Option<Key>) -> Result<Self, Stop> {
        let (address, prefix) = match text.rsplit_once('#') {
            Some((address, prefix)) => (address, format!("{prefix}-")),
            None => (text, String::new()),
        };
        let series = Self { address: address.to_owned(), prefix, key };
        match ImagePlace::parse(&series.path(&series.name_now())).map_err(stop)? {
            ImagePlace::Store { .. } => Ok(series),
            _ => Err(Stop::usage(format!(
                "{text} is no store: write store:DIRECTORY or s3://BUCKET/PREFIX, with #PREFIX for names that begin with PREFIX-"
            ))),
        }
    }

    /// The path of an image.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        format!("{}#{name}", self.address).into()
    }

    /// A name for an image of this moment.
    pub(super) fn name_now(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("{}{}", self.prefix, utc(now))
    }

    /// Removes all images of the series except the newest `count`, and what no image needs any more.
    pub(super) fn keep(&self, count: usize) -> Result<(), Stop> {
        let directory = self.address.strip_prefix("store:").unwrap_or(&self.address);
        let store = ImagePlace::store(Path::new(directory), self.key.clone(), false).map_err(stop)?;
        let names = store.list().map_err(stop)?.into_iter().map(|named| named.name);
        let mut names: Vec<_> = names.filter(|name| self.has(name)).collect();
        names.sort_unstable();
        let old = names.len().saturating_sub(count);
        for name in &names[..old] {
            store.remove(name).map_err(stop)?;
        }
        if old > 0 {
            // Layers keep their bases, also those without a name. If another save runs, nothing is removed now.
            store.collect().map_err(stop)?;
        }
        Ok(())
    }

    /// Writes an image again with all pages of its bases, under the same name.
    pub(super) fn flatten(&self, name: &str, frames: &FrameOptions) -> Result<(), Stop> {
        let path = self.path(name);
        let options = ConvertOptions {
            target: Some(Format::Sterna),
            replace: true,
            access: Access { key: self.key.clone(), bases: Vec::new() },
            frames: frames.clone(),
            ..ConvertOptions::default()
        };
        let converted = convert(Input::File(path.clone()), Output::File(path.clone()), &options);
        converted.map(drop).map_err(|error| Stop::of_image(&error, &[&path]))
    }

    fn has(&self, name: &str) -> bool {
        name.strip_prefix(&self.prefix).is_some_and(is_utc)
    }
}

fn stop(error: sterna_image::StoreError) -> Stop {
    Stop::of_image(&error.into(), &[])
}

/// The time since 1970 as `20261201T084500.123Z`, so that the order of names is the order of times.
fn utc(since: Duration) -> String {
    let (days, rest) = (since.as_secs() / 86400, since.as_secs() % 86400);
    // Years that begin in March, so that the leap day is their last day; 719468 days from March of the year 0 to 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}.{:03}Z", since.subsec_millis())
}

fn is_utc(text: &str) -> bool {
    let shape = b"00000000T000000.000Z";
    text.len() == shape.len()
        && text.bytes().zip(shape).all(|(byte, shape)| match shape {
            b'0' => byte.is_ascii_digit(),
            shape => byte == *shape,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc_and_sorted_as_names() {
        let at = |seconds: u64, millis| utc(Duration::from_millis(seconds * 1000 + millis));
        assert_eq!(at(0, 0), "19700101T000000.000Z");
        assert_eq!(at(951_782_400, 7), "20000229T000000.007Z");
        assert_eq!(at(1_796_114_700, 123), "20261201T084500.123Z");
        assert_eq!(at(4_107_542_399, 999), "21000228T235959.999Z");
        assert_eq!(at(4_107_542_400, 0), "21000301T000000.000Z");
        assert!(is_utc(&at(1, 2)) && !is_utc("web1") && !is_utc("20261201T084500Z"));
        assert!(at(1_796_114_699, 999) < at(1_796_114_700, 0));
    }
}
