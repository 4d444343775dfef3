//! The figures of one migration, as JSON and as a value.
//!
//! The field names are [`sterna::Statistics`]'s own. Differences on this surface: every time is a number of
//! seconds, and fields that a reader does not know are left alone, so that records of newer versions can be
//! read. The document around them is [`crate::record::Record`].

use serde::{Deserialize, Deserializer, Serialize};

/// [`sterna::Statistics`] as it stands in files and answers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// `active`, `completed`, … ([`sterna::Status`]).
    pub status: String,
    /// Why it failed, or what an operator must know.
    pub error: Option<String>,
    /// Seconds since the start until the end or now.
    #[serde(deserialize_with = "time")]
    pub total_time: f64,
    /// Seconds of connecting and exchanging headers.
    #[serde(deserialize_with = "time")]
    pub setup_time: f64,
    /// Seconds of the guest's pause, once it is known.
    #[serde(deserialize_with = "optional_time")]
    pub downtime: Option<f64>,
    /// Seconds of the pause expected if the switchover came now.
    #[serde(deserialize_with = "time")]
    pub expected_downtime: f64,
    /// The pause's parts, in order.
    pub switchover: Vec<Step>,
    /// RAM of the guest, bytes.
    pub ram_total_bytes: u64,
    /// Dirty bytes still to send.
    pub ram_remaining_bytes: u64,
    /// Everything written to all channels, bytes.
    pub transferred_bytes: u64,
    /// Of these, on multifd channels.
    pub multifd_bytes: u64,
    /// Of these, while the guest ran.
    pub precopy_bytes: u64,
    /// Of these, while the guest was stopped.
    pub downtime_bytes: u64,
    /// Pages sent as zero, without content.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages found never populated; part of `zero_pages`.
    pub absent_pages: u64,
    /// Bytes per second while bytes moved, over the last seconds.
    pub bandwidth_bytes: u64,
    /// Bytes per second that went out, all time counted.
    pub throughput_bytes: u64,
    /// Bytes of dirty memory per second that lanes got rid of while they worked.
    pub drain_bytes: u64,
    /// Pages that the guest dirties per second, as of the last round.
    pub dirty_pages_per_second: u64,
    /// Pages sent per second in the last window.
    pub pages_per_second: u64,
    /// Rounds begun.
    pub rounds_begun: u64,
    /// Every finished round.
    pub rounds: Vec<Round>,
    /// About ten a second.
    pub samples: Vec<Sample>,
    /// Channels that carry pages.
    pub channels: u32,
    /// Whether the peer is a Sterna; unknown until it has answered.
    pub peer_is_sterna: Option<bool>,
    /// Share of the time, percent, that vCPUs were made to sleep.
    pub cpu_throttle_percent: u8,
    /// Whether each vCPU's dirty rate was held down.
    pub is_dirty_limited: bool,
    /// What that did to the guest.
    pub dirty_limit_times: Option<DirtyLimitTimes>,
    /// Devices with large state.
    pub streams: Vec<Stream>,
}

/// What dirty limits did to the guest ([`sterna::DirtyLimitTimes`]); times in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyLimitTimes {
    /// A vCPU slept so long for every ring that it filled.
    #[serde(deserialize_with = "time")]
    pub throttled_per_round: f64,
    /// An average vCPU took so long to fill one.
    #[serde(deserialize_with = "time")]
    pub ring_full: f64,
}

/// What became of a device's large state ([`sterna::StreamStatistics`]); times in seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stream {
    /// The device's section name.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Bytes of it.
    pub bytes: u64,
    /// Of these, while the guest ran.
    pub running_bytes: u64,
    /// In the device's calls.
    #[serde(deserialize_with = "time")]
    pub working: f64,
    /// Waiting for buffers, room or bytes.
    #[serde(deserialize_with = "time")]
    pub waiting: f64,
    /// From the device's stop until all was read.
    #[serde(deserialize_with = "time")]
    pub took: f64,
    /// Loading its configuration, at the destination.
    #[serde(deserialize_with = "time")]
    pub configuration: f64,
    /// The most bytes that the destination held for it.
    pub peak_bytes: u64,
}

/// One part of the pause: its name ([`sterna::SwitchoverStep`]) and its seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step(pub String, #[serde(deserialize_with = "time")] pub f64);

/// One round over the dirty pages ([`sterna::Round`]); times in seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Round {
    /// From 1.
    pub number: u64,
    /// When it began, since the migration's start.
    #[serde(deserialize_with = "time")]
    pub began: f64,
    /// How long it lasted.
    #[serde(deserialize_with = "time")]
    pub took: f64,
    /// Pages that it set out to send.
    pub pages: u64,
    /// Bytes it wrote.
    pub bytes: u64,
    /// What lanes did meanwhile.
    pub lanes: LaneTimes,
    /// Time that harvesting dirty bits took, most of it while lanes sent.
    #[serde(deserialize_with = "time")]
    pub sync: f64,
    /// Its parts.
    pub sync_parts: SyncParts,
    /// Pages found dirty at its end.
    pub dirtied_pages: u64,
    /// Whether the guest was stopped.
    pub stopped: bool,
}

/// What lanes did with their time ([`sterna::LaneTimes`]): seconds, per lane on average.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneTimes {
    /// Looking for zero pages.
    #[serde(deserialize_with = "time")]
    pub scan: f64,
    /// Making pages ready to be read.
    #[serde(deserialize_with = "time")]
    pub rearm: f64,
    /// Compressing.
    #[serde(deserialize_with = "time")]
    pub encode: f64,
    /// Writing: the time in which bytes moved.
    #[serde(deserialize_with = "time")]
    pub moving: f64,
    /// Held back by the bandwidth limit.
    #[serde(deserialize_with = "time")]
    pub throttled: f64,
    /// Waiting for pages.
    #[serde(deserialize_with = "time")]
    pub idle: f64,
}

/// Where the time of harvesting dirty bits went ([`sterna::SyncParts`]): seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SyncParts {
    /// The kernel's.
    #[serde(deserialize_with = "time")]
    pub kernel: f64,
    /// Reading and clearing the logs of vhost back ends.
    #[serde(deserialize_with = "time")]
    pub vhost: f64,
    /// Merging bitmaps that begin on a word of their block's.
    #[serde(deserialize_with = "time")]
    pub aligned: f64,
    /// Merging those that do not.
    #[serde(deserialize_with = "time")]
    pub misaligned: f64,
}

/// The state at one instant ([`sterna::Sample`]).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Seconds since the migration's start.
    #[serde(deserialize_with = "time")]
    pub at: f64,
    /// All bytes written so far.
    pub transferred_bytes: u64,
    /// Still to send.
    pub remaining_bytes: u64,
    /// Pages dirtied per second, as last measured.
    pub dirty_pages_per_second: u64,
}

impl Figures {
    /// Time in which bytes moved, over all rounds; the rounds' length where that was not measured.
    pub fn moving_seconds(&self) -> f64 {
        let moving: f64 = self.rounds.iter().map(|round| round.lanes.moving).sum();
        if moving > 0.0 { moving } else { self.rounds.iter().map(|round| round.took).sum() }
    }

    /// Bytes of all rounds over the time in which bytes moved; nothing if none did.
    pub fn moving_bandwidth(&self) -> Option<f64> {
        let bytes: u64 = self.rounds.iter().map(|round| round.bytes).sum();
        let seconds = self.moving_seconds();
        (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds)
    }

    /// Time that harvesting dirty bits took, over all rounds.
    pub fn sync_seconds(&self) -> f64 {
        self.rounds.iter().map(|round| round.sync).sum()
    }

    /// What lanes did over all rounds while the guest ran, per lane on average.
    pub fn lane_seconds(&self) -> LaneTimes {
        let mut sum = LaneTimes::default();
        for LaneTimes { scan, rearm, encode, moving, throttled, idle } in
            self.rounds.iter().filter(|round| !round.stopped).map(|round| &round.lanes)
        {
            sum.scan += scan;
            sum.rearm += rearm;
            sum.encode += encode;
            sum.moving += moving;
            sum.throttled += throttled;
            sum.idle += idle;
        }
        sum
    }

    /// Pages that became dirty during the round at `index`: what was found at its end, or what the next one
    /// set out with, whichever is known.
    pub fn dirtied_in(&self, index: usize) -> u64 {
        let pages = |index: usize, pages: fn(&Round) -> u64| self.rounds.get(index).map_or(0, pages);
        pages(index, |round| round.dirtied_pages).max(pages(index + 1, |round| round.pages))
    }

    /// The highest dirty rate that was seen, over a round or a sample, bytes per second.
    pub fn most_dirty_rate(&self) -> f64 {
        let sampled = self.samples.iter().map(|sample| sample.dirty_pages_per_second).max().unwrap_or(0);
        let rounds = self.rounds.iter().enumerate().filter(|(_, round)| round.took > 0.0);
        let most = rounds.map(|(at, round)| self.dirtied_in(at) as f64 / round.took).fold(0.0, f64::max);
        most.max(sampled.max(self.dirty_pages_per_second) as f64) * crate::units::PAGE_BYTES as f64
    }
}

/// Seconds as a number, or as serde writes a `Duration`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Time {
    Seconds(f64),
    Duration { secs: u64, nanos: u32 },
}

impl From<Time> for f64 {
    fn from(time: Time) -> Self {
        match time {
            Time::Seconds(seconds) => seconds,
            Time::Duration { secs, nanos } => secs as f64 + f64::from(nanos) / 1e9,
        }
    }
}

fn time<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let seconds = f64::from(Time::deserialize(from)?);
    if seconds.is_finite() && seconds >= 0.0 {
        Ok(to_nanoseconds(seconds))
    } else {
        Err(serde::de::Error::custom(format!("{seconds} is not a time in seconds")))
    }
}

fn optional_time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Time>::deserialize(from)?
        .map(f64::from)
        .filter(|s| s.is_finite() && *s >= 0.0)
        .map(to_nanoseconds))
}

/// The nearest whole nanosecond: what is written and read again is then equal.
fn to_nanoseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e9
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::samples::engine_statistics;

    #[test]
    fn figures_of_the_engines_statistics_have_every_field_of_it() {
        let engine = serde_json::to_value(engine_statistics()).unwrap();

        let figures: Figures = serde_json::from_value(engine.clone()).unwrap();

        let ours = serde_json::to_value(&figures).unwrap();
        assert_same_keys(&engine, &ours, "statistics");
        assert_eq!(figures.total_time, engine_statistics().total_time.as_secs_f64());
        assert_eq!(figures.switchover[0].0, "stop");
    }

    /// A field that the engine gains must be taken up here, or the report would lose it in silence.
    fn assert_same_keys(engine: &Value, ours: &Value, place: &str) {
        match (engine, ours) {
            (Value::Object(map), Value::Object(ours)) => {
                for (key, value) in map {
                    let found = ours.get(key).unwrap_or_else(|| panic!("Figures lacks {place}.{key}"));
                    assert_same_keys(value, found, &format!("{place}.{key}"));
                }
            }
            (Value::Array(list), Value::Array(ours)) => {
                list.iter().zip(ours).for_each(|(a, b)| assert_same_keys(a, b, place));
            }
            _ => {}
        }
    }

    #[test]
    fn figures_written_and_read_again_are_equal() {
        let figures: Figures =
            serde_json::from_value(serde_json::to_value(engine_statistics()).unwrap()).unwrap();

        let again: Figures = serde_json::from_str(&serde_json::to_string(&figures).unwrap()).unwrap();

        assert_eq!(again, figures);
    }

    #[test]
    fn figures_with_a_negative_time_are_refused() {
        assert!(serde_json::from_value::<Figures>(json!({ "total_time": -1.0 })).is_err());
    }

    #[test]
    fn moving_bandwidth_leaves_out_time_in_which_nothing_moved() {
        let lanes = |moving| LaneTimes { moving, ..LaneTimes::default() };
        let round = |moving, bytes| Round { took: 10.0, lanes: lanes(moving), bytes, ..Round::default() };
        let figures = Figures { rounds: vec![round(1.0, 100), round(3.0, 300)], ..Figures::default() };

        assert_eq!(figures.moving_bandwidth(), Some(100.0));
        assert_eq!(Figures::default().moving_bandwidth(), None);
    }

    #[test]
    fn dirtied_in_a_round_is_at_least_what_the_next_one_sends() {
        let round = |pages, dirtied_pages| Round { took: 2.0, pages, dirtied_pages, ..Round::default() };
        let figures = Figures { rounds: vec![round(50, 0), round(30, 40)], ..Figures::default() };

        assert_eq!([0, 1, 2].map(|index| figures.dirtied_in(index)), [30, 40, 0]);
        assert_eq!(figures.most_dirty_rate(), 20.0 * 4096.0);
    }

    #[test]
    fn durations_read_in_either_form_are_the_same() {
        let duration = serde_json::to_value(Duration::from_millis(1500)).unwrap();

        let figures: Figures =
            serde_json::from_value(json!({ "total_time": duration, "setup_time": 1.5 })).unwrap();

        assert_eq!((figures.total_time, figures.setup_time), (1.5, 1.5));
    }
}
