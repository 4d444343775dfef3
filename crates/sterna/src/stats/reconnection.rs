//! Statistics of lost and replaced connections.

use std::time::Duration;

use sterna_forecast::time_forms::{optional, time};

/// A connection that was lost and then replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Reconnection {
    /// Time from the migration's start to the loss.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// Time without a connection.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Time in which the guest was paused, if the loss happened in a switchover.
    #[serde(deserialize_with = "optional")]
    pub stood: Option<Duration>,
    /// Bytes of pages that were sent again, because the first copy had not arrived.
    pub resent_bytes: u64,
    /// The cause of the loss.
    pub why: String,
}

/// Totals over several lost and replaced connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ReconnectionTotals {
    /// Number of connections.
    pub count: u64,
    /// Total time without a connection.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Total time in which the guest was paused in switchovers that were undone.
    #[serde(deserialize_with = "time")]
    pub stood: Duration,
    /// Bytes of pages that were sent again.
    pub resent_bytes: u64,
}

impl ReconnectionTotals {
    /// Adds one reconnection to the totals.
    pub(crate) fn add(&mut self, reconnection: &Reconnection) {
        self.count += 1;
        self.took += reconnection.took;
        self.stood += reconnection.stood.unwrap_or_default();
        self.resent_bytes += reconnection.resent_bytes;
    }

    pub(crate) fn is_none(&self) -> bool {
        self.count == 0
    }
}
