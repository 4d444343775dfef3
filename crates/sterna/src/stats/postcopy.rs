//! Statistics of postcopy at the source: the guest runs at the destination, and its pages follow.

use std::time::Duration;

use super::fault_series::FaultSeries;
use super::latencies::Latencies;
use super::reconnection::Reconnection;
use sterna_forecast::time_forms::{optional, time};

/// The source's statistics of postcopy.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyStatistics {
    /// Time from the migration's start until the guest resumed at the destination.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// Time from the migration's start until the last page was sent; `None` while pages remain.
    #[serde(deserialize_with = "optional")]
    pub all_sent: Option<Duration>,
    /// Bytes of pages that were missing at the destination at the switch.
    pub missing_bytes: u64,
    /// Requests over time: pages that the destination requested because a thread there waited for them.
    pub faults: FaultSeries,
    /// Time from a request's arrival until its last page was handed to the network. The guest waits longer, by the
    /// network's round trip. Requests that were lost with a connection are not counted.
    pub answers: Latencies,
    /// Pages and bytes that each channel carried after the switch.
    pub channels: Vec<PostcopyChannel>,
    /// Number of times that postcopy continued after a lost connection.
    pub recoveries: u64,
    /// Total time without a connection before these recoveries.
    #[serde(deserialize_with = "time")]
    pub paused_time: Duration,
    /// Each of these interruptions; the last ones if there are many.
    pub pauses: Vec<Reconnection>,
    /// The present interruption, while the connection is lost: its begin and its cause.
    pub paused: Option<Reconnection>,
}

/// Pages and bytes that one channel carried after the switch.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyChannel {
    /// `main`, `preempt`, or `multifd` with its number.
    pub name: String,
    /// Background pages: sent without a request.
    pub background_pages: u64,
    /// Pages that the destination had requested.
    pub requested_pages: u64,
    /// Bytes that were sent for these pages.
    pub sent_bytes: u64,
}
