//! Statistics of a guest that goes on at its destination before its pages are there.

use std::time::Duration;

use super::histogram::Latencies;
use super::reconnection::Reconnection;
use super::series::FaultSeries;
use crate::time_forms::{optional, time};

/// What the source of a postcopy did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyStatistics {
    /// When the guest went on at the destination, since the migration began.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// When the last page was sent, since the migration began; `None` while some are left.
    #[serde(deserialize_with = "optional")]
    pub all_sent: Option<Duration>,
    /// Bytes of pages that the destination lacked at the switch.
    pub missing_bytes: u64,
    /// Requests over time: what the destination asked for, because something there waited for it.
    pub faults: FaultSeries,
    /// From a request's arrival until its last page was handed to the network. The guest waits longer: for the way there and back.
    /// Requests that were lost with a connection are not counted.
    pub answers: Latencies,
    /// What went over each channel since the switch.
    pub channels: Vec<PostcopyChannel>,
    /// How often the connection was lost and postcopy went on.
    pub recoveries: u64,
    /// How long there was no connection before these, in total.
    #[serde(deserialize_with = "time")]
    pub paused_time: Duration,
    /// Each of them; of very many the last.
    pub pauses: Vec<Reconnection>,
    /// The connection is lost: since when, and what is known of it.
    pub paused: Option<Reconnection>,
}

/// What one channel carried after the switch.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyChannel {
    /// `main`, `preempt`, or `multifd` and its number.
    pub name: String,
    /// Pages that nobody had asked for.
    pub background_pages: u64,
    /// Pages that the destination had asked for.
    pub requested_pages: u64,
    /// Bytes that these took.
    pub sent_bytes: u64,
}
