//! The policy's inputs and outputs. Times are those since the migration began.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counts::Counts;
use super::settings::Settings;

/// Something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Input {
    /// The first round is published, and pages begin to move.
    Began(Begun, Snapshot),
    /// Time has passed.
    #[serde(rename = "Looked")]
    Observed(Snapshot),
    /// The sync that was asked for has ended.
    Synced(SyncResult, Snapshot),
    /// Every lane is through with the round that was to run dry, and its flush is written.
    Flushed(Snapshot),
    /// The switchover was refused: the destination has not acknowledged yet.
    NotAcknowledged(Snapshot),
    /// The destination has answered a probe.
    Answered(Answer),
    /// An operator has changed settings.
    Set(Settings),
    /// The migration ends, however it does.
    Ended,
}

/// What is known when pages begin to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// What an operator has set.
    pub settings: Settings,
    /// Lanes.
    pub channels: u32,
    /// How long the peer took to answer at the start.
    pub round_trip: Duration,
    /// The downtime besides the last sync and the remaining pages: stopping, devices, *prepare*, the start, with their
    /// round trips.
    #[serde(rename = "fixed_pause")]
    pub fixed_downtime: Duration,
}

/// The state of the migration at one instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// The instant.
    pub now: Duration,
    /// How much later the thread woke than it had asked to; `None` if it was woken for a reason, or never slept.
    pub late: Option<Duration>,
    /// What lanes have done.
    pub counts: Counts,
    /// The round that was published last.
    #[serde(rename = "pass")]
    pub round: RoundProgress,
}

/// How far a round has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoundProgress {
    /// Pages that it began with.
    pub pages: u64,
    /// Pages that no lane has taken yet.
    #[serde(rename = "left")]
    pub remaining: u64,
    /// Every slice is re-armed, and every chunk is claimed.
    pub is_rearmed: bool,
    /// The search for absent pages is complete.
    pub is_searched: bool,
}

/// What a sync found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SyncResult {
    /// How long it took.
    pub took: Duration,
    /// Pages newly found dirty, but for those that the running round still reads.
    pub dirtied_pages: u64,
    /// Pages in the next round, if it were published now.
    pub next_pages: u64,
    /// What else would have to move in the downtime.
    pub backlog: Backlog,
}

/// What has to move in the downtime besides pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Backlog {
    /// Bytes that were written and are still on this host: they go out before the last pages do.
    pub unsent_bytes: u64,
    /// Devices' streams; `None` before every device was asked.
    pub streams: Option<StreamsRemaining>,
    /// Whether the guest runs.
    pub guest_runs: bool,
}

/// What remains of devices' streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamsRemaining {
    /// Bytes of all of them.
    pub bytes: u64,
    /// How long the slowest device needs.
    pub slowest: Duration,
    /// None of it moves while the guest runs: no lane carries it.
    #[serde(default)]
    pub moves_in_downtime: bool,
}

/// How long the destination took to answer a probe. The probe follows a round's flush, so the answer means that the
/// destination has all pages of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// From writing the probe to its answer.
    pub took: Duration,
    /// Bytes that were still on this host when it was written.
    pub unsent_bytes: u64,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Output {
    /// Sync, then [`Input::Synced`].
    Sync,
    /// Make the next round of what syncs have found, and let lanes enter it.
    Publish {
        /// Send some pages though they are zero: nothing is known of the network, and devices' state waits.
        tries_network: bool,
    },
    /// Wait until every lane is through with round `number` (the first is 1), write its flush, then [`Input::Flushed`].
    RunDry {
        /// Its number.
        number: u64,
    },
    /// Let vCPUs sleep this share of the time, percent; 0: none.
    Throttle(u8),
    /// Limit each vCPU's dirty rate to so many bytes per second; `None`: remove the limit.
    LimitDirtyRate(Option<u64>),
    /// Warn the operator, once, that the migration does not converge.
    Warn(Standstill),
    /// Fail, since it does not converge.
    GiveUp(Standstill),
    /// Stop the guest; if that is refused, [`Input::NotAcknowledged`].
    RequestSwitchover,
}

/// The rates that show why a migration does not converge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standstill {
    /// Bytes per second that the guest dirties.
    pub dirtied_bytes: u64,
    /// Bytes of dirty memory per second that lanes get rid of.
    pub drained_bytes: u64,
    /// The downtime if the switchover began now.
    pub expected: Duration,
    /// The part of it that devices' streams alone would take.
    pub streams: Duration,
}
