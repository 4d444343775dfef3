//! The policy's inputs and outputs. Times are relative to the migration's start.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counts::Counts;
use super::settings::Settings;

/// An event for the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// The first round is published, and pages begin to move.
    Began(Begun, Snapshot),
    /// Time has passed.
    #[serde(rename = "Looked")]
    Observed(Snapshot),
    /// The requested sync has ended.
    Synced(SyncResult, Snapshot),
    /// All lanes have finished the round that was to run dry, and its flush is written.
    Flushed(Snapshot),
    /// The switchover was refused, because the destination has not acknowledged yet.
    NotAcknowledged(Snapshot),
    /// The destination has answered a probe.
    Answered(Answer),
    /// An operator has changed settings.
    Set(Settings),
    /// The migration ends, successfully or not.
    Ended,
}

/// Values that are known when pages begin to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The operator's settings.
    pub settings: Settings,
    /// Number of lanes.
    pub channels: u32,
    /// Round-trip time, measured when the connection was set up.
    pub round_trip: Duration,
    /// The downtime besides the last sync and the remaining pages: stop, devices, *prepare* and start, with their
    /// round trips.
    #[serde(rename = "fixed_pause")]
    pub fixed_downtime: Duration,
}

/// The state of the migration at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The time of the snapshot.
    pub now: Duration,
    /// How late the thread woke after the requested time. `None` if it was woken by an event, or did not sleep.
    pub late: Option<Duration>,
    /// The counters of the lanes.
    pub counts: Counts,
    /// The round that was published last.
    #[serde(rename = "pass")]
    pub round: RoundProgress,
}

/// The progress of a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundProgress {
    /// Number of pages at its start.
    pub pages: u64,
    /// Number of pages that no lane has claimed yet.
    #[serde(rename = "left")]
    pub remaining: u64,
    /// Whether every slice is re-armed and every chunk is claimed.
    pub is_rearmed: bool,
    /// Whether the search for absent pages is complete.
    pub is_searched: bool,
}

/// The result of a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncResult {
    /// Duration of the sync.
    pub took: Duration,
    /// Number of newly dirty pages, without those that the present round still reads.
    pub dirtied_pages: u64,
    /// Number of pages in the next round if it were published now.
    pub next_pages: u64,
    /// Other data that would have to move in the downtime.
    pub backlog: Backlog,
}

/// Data besides pages that has to move in the downtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backlog {
    /// Bytes that were written to sockets and are still on this host. They are sent before the last pages.
    pub unsent_bytes: u64,
    /// State of the device streams. `None` until every device was queried.
    pub streams: Option<StreamsRemaining>,
    /// Whether the guest runs.
    pub guest_runs: bool,
}

/// The remaining part of the device streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamsRemaining {
    /// Remaining bytes of all streams.
    pub bytes: u64,
    /// Time that the slowest device needs.
    pub slowest: Duration,
    /// Whether all of it must move in the downtime, because no lane can carry it before.
    #[serde(default)]
    pub moves_in_downtime: bool,
}

/// The destination's answer to a probe. The probe follows a round's flush, so the answer means that the destination
/// has all pages of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Time from writing the probe until its answer.
    pub took: Duration,
    /// Bytes in sockets of this host when the probe was written.
    pub unsent_bytes: u64,
}

/// A request of the policy to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Output {
    /// Sync, then report [`Input::Synced`].
    Sync,
    /// Make the next round from the pages found by syncs, and let lanes enter it.
    Publish {
        /// Send some pages, also zero pages, with content, to measure the network. Device state waits, and no bandwidth is
        /// known, or the last measurement is old.
        tries_network: bool,
    },
    /// Wait until all lanes have finished round `number` (the first is 1). Write its flush, then report
    /// [`Input::Flushed`].
    RunDry {
        /// Number of the round.
        number: u64,
    },
    /// Throttle the vCPUs: each sleeps for this percentage of the time. 0: no throttle.
    Throttle(u8),
    /// Limit the dirty rate of each vCPU, in bytes per second. `None`: remove the limit.
    LimitDirtyRate(Option<u64>),
    /// Warn the operator, once, that the migration does not converge.
    Warn(Standstill),
    /// Fail the migration, because it does not converge.
    GiveUp(Standstill),
    /// Stop the guest. If this is refused, report [`Input::NotAcknowledged`].
    RequestSwitchover,
}

/// The measured rates of a migration that does not converge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standstill {
    /// Bytes that the guest dirties per second.
    pub dirtied_bytes: u64,
    /// Bytes of dirty memory that lanes send per second.
    pub drained_bytes: u64,
    /// The downtime if the switchover began now.
    pub expected: Duration,
    /// The part of `expected` that device streams alone would take.
    pub streams: Duration,
}
