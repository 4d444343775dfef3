//! Statistics of a primary.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sterna::internals::{Counts, DeltaCounts, Pace};

use super::gate::GateStatistics;
use super::staging::CopyCounts;

/// Counters and times of a primary. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrimaryStatistics {
    /// Checkpoints that were taken.
    pub taken: u64,
    /// Number of the last checkpoint that the standby holds.
    pub held: u64,
    /// Pages in all checkpoints, including zero pages.
    pub pages: u64,
    /// Pages in the last checkpoint.
    pub last_pages: u64,
    /// Bytes of devices in all checkpoints.
    pub device_bytes: u64,
    /// Checkpoints that did not fit the buffer, so that the guest was paused until they were sent.
    pub unbuffered: u64,
    /// Pages that were copied before the guest was paused, and not written again before the pause.
    pub copied_ahead: u64,
    /// Checkpoints with pages that were write-protected during the pause, and copied after the guest resumed.
    pub copied_on_write: u64,
    /// Writes of the guest that were blocked until the page was copied.
    pub held_writes: u64,
    /// Results of sending differences.
    pub xbzrle: DeltaStatistics,
    /// Downtime per checkpoint: median and 99th percentile of the last 1024 checkpoints, and the longest of all.
    pub pause_p50: Duration,
    /// See [`PrimaryStatistics::pause_p50`].
    pub pause_p99: Duration,
    /// See [`PrimaryStatistics::pause_p50`].
    pub pause_most: Duration,
    /// Downtime of the last checkpoint.
    pub pause_last: Duration,
    /// Present time from the beginning of a checkpoint to the beginning of the next. Waiting output may shorten it.
    pub interval: Duration,
    /// Time from the end of the last pause until the standby held the checkpoint.
    pub last_transfer: Duration,
    /// Output that waits for its checkpoint.
    pub output: GateStatistics,
}

/// Pages of checkpoints with `xbzrle`. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeltaStatistics {
    /// Pages that were sent as the difference from the standby's copy.
    pub pages: u64,
    /// Bytes of these differences.
    pub bytes: u64,
    /// Pages that were not sent, because the standby has the same content.
    pub same: u64,
    /// Pages that were sent completely, because the cache did not contain the standby's copy.
    pub cache_misses: u64,
    /// Pages that were sent completely, because the difference was not shorter.
    pub overflows: u64,
}

impl DeltaStatistics {
    fn of(counts: &DeltaCounts) -> Self {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            pages: get(&counts.pages),
            bytes: get(&counts.bytes),
            same: get(&counts.same),
            cache_misses: get(&counts.misses),
            overflows: get(&counts.overflows),
        }
    }
}

impl PrimaryStatistics {
    pub(super) fn of(
        (counts, deltas, copies): (&Counts, &DeltaCounts, &CopyCounts),
        pace: &Pace,
        held: u64,
        output: GateStatistics,
    ) -> Self {
        let mut pauses: Vec<Duration> = counts.pauses.iter().copied().collect();
        pauses.sort_unstable();
        let at = |percent: usize| {
            let index = (pauses.len() * percent).div_ceil(100).saturating_sub(1);
            pauses.get(index).copied().unwrap_or_default()
        };
        Self {
            taken: counts.taken,
            held,
            pages: counts.pages,
            last_pages: counts.last_pages,
            device_bytes: counts.device_bytes,
            unbuffered: counts.unstaged,
            copied_ahead: copies.ahead_pages,
            copied_on_write: copies.on_write,
            held_writes: copies.held_writes,
            xbzrle: DeltaStatistics::of(deltas),
            pause_p50: at(50),
            pause_p99: at(99),
            pause_most: at(100),
            pause_last: counts.pauses.back().copied().unwrap_or_default(),
            interval: pace.interval(counts.pause),
            last_transfer: counts.last_transfer,
            output,
        }
    }
}
