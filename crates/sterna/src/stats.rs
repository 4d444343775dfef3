//! Statistics: everything that `info migrate` shows, and what it lacks, as typed values.
//!
//! Sync, scan and movement are timed apart, so that bandwidth means bytes over the time in which bytes moved.

use std::time::Duration;

use crate::events::{Status, SwitchoverStep};

/// A migration's figures at one instant. All byte counts are totals since it began.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Statistics {
    /// Where it stands.
    pub status: Status,
    /// Why it failed, or what an operator must know (undecided).
    pub error: Option<String>,
    /// Since the start until the end or now.
    pub total_time: Duration,
    /// Connecting and exchanging headers.
    pub setup_time: Duration,
    /// The guest's pause, once it is known.
    pub downtime: Option<Duration>,
    /// The pause expected if the switchover came now.
    pub expected_downtime: Duration,
    /// The pause's parts, in order.
    pub switchover: Vec<(SwitchoverStep, Duration)>,
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
    /// Bytes per second in the last window in which bytes moved.
    pub bandwidth_bytes: u64,
    /// Pages that the guest dirties per second, as of the last round.
    pub dirty_pages_per_second: u64,
    /// Pages sent per second in the last window.
    pub pages_per_second: u64,
    /// Rounds begun (`dirty-sync-count`).
    pub rounds_begun: u64,
    /// Every finished round; of more than a few thousand, neighbours are told as one.
    pub rounds: Vec<Round>,
    /// About ten a second: for timelines.
    pub samples: Vec<Sample>,
    /// Channels that carry pages.
    pub channels: u32,
    /// Whether the peer is a Sterna.
    pub peer_is_sterna: Option<bool>,
}

/// One round over the dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Round {
    /// From 1.
    pub number: u64,
    /// When it began, since the migration's start.
    pub began: Duration,
    /// How long it lasted.
    pub took: Duration,
    /// Pages that it set out to send.
    pub pages: u64,
    /// Bytes it wrote.
    pub bytes: u64,
    /// Time in which bytes moved.
    pub moving: Duration,
    /// Time that harvesting dirty bits took.
    pub sync: Duration,
    /// Time that the bandwidth limit held lanes back.
    pub throttled: Duration,
    /// Pages found dirty at its end.
    pub dirtied_pages: u64,
    /// Whether the guest was stopped.
    pub stopped: bool,
}

/// The state of a migration at one instant of its timeline.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sample {
    /// Since the migration's start.
    pub at: Duration,
    /// All bytes written so far.
    pub transferred_bytes: u64,
    /// Still to send.
    pub remaining_bytes: u64,
    /// Pages dirtied per second, as last measured.
    pub dirty_pages_per_second: u64,
}

/// A destination's figures.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct IncomingStatistics {
    /// Where it stands.
    pub status: Status,
    /// Why it failed.
    pub error: Option<String>,
    /// Everything read from all channels, bytes.
    pub received_bytes: u64,
    /// Pages received with content.
    pub normal_pages: u64,
    /// Pages received as zero.
    pub zero_pages: u64,
    /// Of these, pages that had to be cleared.
    pub cleared_pages: u64,
}
