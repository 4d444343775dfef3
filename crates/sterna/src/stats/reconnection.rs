//! Connections that were lost.

use std::time::Duration;

use crate::time_forms::{optional, time};

/// A connection that was lost and made anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Reconnection {
    /// When it was lost, since the migration began.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// How long there was none.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// How long the guest stood, if that was in a switchover.
    #[serde(deserialize_with = "optional")]
    pub stood: Option<Duration>,
    /// Bytes of pages that were sent before and were sent again, because they had not arrived.
    pub resent_bytes: u64,
    /// How it was lost.
    pub why: String,
}

/// Connections that were lost and made anew, in sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ReconnectionTotals {
    /// How many.
    pub count: u64,
    /// How long there was none.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// How long the guest stood in switchovers that were taken back.
    #[serde(deserialize_with = "time")]
    pub stood: Duration,
    /// Bytes of pages that were sent again.
    pub resent_bytes: u64,
}

impl ReconnectionTotals {
    /// One more.
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
