//! A connection that was lost.

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
