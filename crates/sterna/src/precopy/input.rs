//! What the policy is told, and what it answers. Times are those since the migration began.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counts::Counts;
use super::settings::Settings;

/// Something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Input {
    /// The first pass is published, and pages begin to move.
    Began(Begun, Look),
    /// Time has passed.
    Looked(Look),
    /// The sync that was asked for has ended.
    Synced(Synced, Look),
    /// Every lane is through with the pass that was to run dry, and its flush is written.
    Flushed(Look),
    /// The switchover was refused: the destination has not acknowledged yet.
    NotAcknowledged(Look),
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
    /// What a pause takes besides look and rest: stopping, devices, *prepare*, the start, with their round trips.
    pub fixed_pause: Duration,
}

/// How things stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Look {
    /// When this was.
    pub now: Duration,
    /// How much later the thread woke than it had asked to; `None` if it was woken for a reason, or never slept.
    pub late: Option<Duration>,
    /// What lanes have done.
    pub counts: Counts,
    /// The pass that was published last.
    pub pass: PassLook,
}

/// How far a pass is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PassLook {
    /// Pages that it began with.
    pub pages: u64,
    /// Pages that no lane has taken yet.
    pub left: u64,
    /// Every slice is re-armed, and no chunk is left to be claimed.
    pub is_rearmed: bool,
    /// All absent pages are known that it looks for.
    pub is_searched: bool,
}

/// What a sync found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Synced {
    /// How long it took.
    pub took: Duration,
    /// Pages newly found dirty, but for those that the running pass still reads.
    pub dirtied_pages: u64,
    /// Pages in the next pass, if it were published now.
    pub next_pages: u64,
    /// What else would have to move in the pause.
    pub backlog: Backlog,
}

/// What has to move in the pause besides pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Backlog {
    /// Bytes that were written and are still on this host: they go out before the last pages do.
    pub unsent_bytes: u64,
    /// Devices' streams; `None` before every device was looked at.
    pub streams: Option<StreamsLeft>,
    /// Whether the guest runs.
    pub guest_runs: bool,
}

/// What is left of devices' streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamsLeft {
    /// Bytes of all of them.
    pub bytes: u64,
    /// How long the slowest device needs.
    pub slowest: Duration,
}

/// How long the destination took to answer a probe that was written right after a flush, and so after all pages of the
/// pass: it answers when it has them.
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
    /// Look for dirty pages, then [`Input::Synced`].
    Sync,
    /// Make the next pass of what syncs have found, and let lanes enter it.
    Publish {
        /// Send some pages though they are zero: nothing is known of the network, and devices' state waits.
        tries_network: bool,
    },
    /// Wait until every lane is through with pass `number` (the first is 1), write its flush, then [`Input::Flushed`].
    RunDry {
        /// Its number.
        number: u64,
    },
    /// Let vCPUs sleep this share of the time, percent; 0: none.
    Throttle(u8),
    /// Hold each vCPU to so many bytes per second; `None`: take that back.
    LimitDirtyRate(Option<u64>),
    /// Tell the operator that it does not converge. Once.
    Warn(Standstill),
    /// Fail, since it does not converge.
    GiveUp(Standstill),
    /// Stop the guest; if that is refused, [`Input::NotAcknowledged`].
    RequestSwitchover,
}

/// Why a migration does not converge, in figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standstill {
    /// Bytes per second that the guest dirties.
    pub dirtied_bytes: u64,
    /// Bytes of dirty memory per second that lanes get rid of.
    pub drained_bytes: u64,
    /// The pause if the switchover came now.
    pub expected: Duration,
    /// What devices' streams alone would take of it.
    pub streams: Duration,
}
