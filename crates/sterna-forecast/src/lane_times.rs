//! The time of lanes, by kind of work.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time_forms::time;

/// The time of lanes by kind of work, as a mean over all lanes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneTimes {
    /// Scanning pages for zeros.
    #[serde(deserialize_with = "time")]
    pub scan: Duration,
    /// Making pages ready for reading: re-arming their tracking, and finding pages that were never populated.
    #[serde(deserialize_with = "time")]
    pub rearm: Duration,
    /// Compressing pages.
    #[serde(deserialize_with = "time")]
    pub encode: Duration,
    /// Writing, including lists of zero pages and ends of rounds. Bandwidth is bytes per this time.
    #[serde(deserialize_with = "time")]
    pub moving: Duration,
    /// Waiting because of the bandwidth limit.
    #[serde(deserialize_with = "time")]
    pub throttled: Duration,
    /// Waiting for pages: for a sync, or for other lanes.
    #[serde(deserialize_with = "time")]
    pub idle: Duration,
}

impl LaneTimes {
    /// Time in which lanes worked: everything except `throttled` and `idle`.
    pub fn busy(&self) -> Duration {
        self.scan + self.rearm + self.encode + self.moving
    }
}

impl std::ops::Add for LaneTimes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            scan: self.scan + other.scan,
            rearm: self.rearm + other.rearm,
            encode: self.encode + other.encode,
            moving: self.moving + other.moving,
            throttled: self.throttled + other.throttled,
            idle: self.idle + other.idle,
        }
    }
}

impl std::ops::Sub for LaneTimes {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            scan: self.scan.saturating_sub(earlier.scan),
            rearm: self.rearm.saturating_sub(earlier.rearm),
            encode: self.encode.saturating_sub(earlier.encode),
            moving: self.moving.saturating_sub(earlier.moving),
            throttled: self.throttled.saturating_sub(earlier.throttled),
            idle: self.idle.saturating_sub(earlier.idle),
        }
    }
}

impl std::ops::Div<u32> for LaneTimes {
    type Output = Self;
    fn div(self, by: u32) -> Self {
        let by = by.max(1);
        Self {
            scan: self.scan / by,
            rearm: self.rearm / by,
            encode: self.encode / by,
            moving: self.moving / by,
            throttled: self.throttled / by,
            idle: self.idle / by,
        }
    }
}
