//! What a primary counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::gate::GateStatistics;
use crate::outgoing::protection::{CopyCounts, Counts, DeltaCounts, Pace};

/// What a primary counts. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrimaryStatistics {
    /// Checkpoints that were taken.
    pub taken: u64,
    /// The last one that the standby holds.
    pub held: u64,
    /// Pages that checkpoints brought, zero pages among them.
    pub pages: u64,
    /// Pages of the last one.
    pub last_pages: u64,
    /// Bytes of devices that checkpoints brought.
    pub device_bytes: u64,
    /// Checkpoints that did not fit the buffer, so that the guest stood until they were sent.
    pub unbuffered: u64,
    /// Pages that were copied before the guest stood, and not written again until it did.
    pub copied_ahead: u64,
    /// Checkpoints with pages that were write-protected while the guest stood, and copied when it went on.
    pub copied_on_write: u64,
    /// Writes of the guest that were held until the page was copied.
    pub held_writes: u64,
    /// What became of differences.
    pub xbzrle: DeltaStatistics,
    /// Downtime by a checkpoint: the median of the last 1024, and what 99 of 100 do not exceed; the longest.
    pub pause_p50: Duration,
    /// See [`PrimaryStatistics::pause_p50`].
    pub pause_p99: Duration,
    /// See [`PrimaryStatistics::pause_p50`].
    pub pause_most: Duration,
    /// From the beginning of a checkpoint to that of the next, as it is now; output may bring the next one forward.
    pub interval: Duration,
    /// From the end of the last pause until the standby held the checkpoint.
    pub last_transfer: Duration,
    /// What waits for its checkpoint.
    pub output: GateStatistics,
}

/// Pages of checkpoints with `xbzrle`. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeltaStatistics {
    /// Pages that were sent as the difference to what the standby holds.
    pub pages: u64,
    /// Bytes of these differences.
    pub bytes: u64,
    /// Pages that were not sent, since the standby holds the same.
    pub same: u64,
    /// Pages that were sent whole, since what the standby holds was not in the cache.
    pub cache_misses: u64,
    /// Pages that were sent whole, since the difference was not shorter.
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
            interval: pace.interval(counts.pause),
            last_transfer: counts.last_transfer,
            output,
        }
    }
}
