//! The result of a sync.

use std::ops::AddAssign;
use std::time::Duration;

/// What a sync found, and what it cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Pages whose bit was clear in the bitmap and is set now.
    pub newly_dirty: u64,
    /// The parts of its time.
    pub times: SyncTimes,
}

impl AddAssign for SyncReport {
    fn add_assign(&mut self, other: Self) {
        self.newly_dirty += other.newly_dirty;
        self.times += other.times;
    }
}

/// The parts of a sync's time. Parts that ran in parallel share the elapsed time, so the total is wall time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncTimes {
    /// The kernel's: GET_DIRTY_LOG, PAGEMAP_SCAN, walking dirty rings.
    pub kernel: Duration,
    /// Reading and clearing vhost logs.
    pub vhost: Duration,
    /// Merging words whose first page in the block is a multiple of 64.
    pub aligned: Duration,
    /// Merging words whose first page in the block is not.
    pub misaligned: Duration,
}

impl SyncTimes {
    /// Adds the time of merging words that were shifted by `bits` bits.
    pub(crate) fn add_merge(&mut self, bits: u32, took: Duration) {
        if bits == 0 {
            self.aligned += took;
        } else {
            self.misaligned += took;
        }
    }
}

impl AddAssign for SyncTimes {
    fn add_assign(&mut self, other: Self) {
        self.kernel += other.kernel;
        self.vhost += other.vhost;
        self.aligned += other.aligned;
        self.misaligned += other.misaligned;
    }
}
