//! The result of a sync: the number of newly dirty pages, and the time spent.

use std::ops::AddAssign;
use std::time::Duration;

/// The pages that a sync found, and its cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Number of pages whose bit was clear in the bitmap and is set now.
    pub newly_dirty: u64,
    /// The time of each part of the sync.
    pub times: SyncTimes,
}

impl AddAssign for SyncReport {
    fn add_assign(&mut self, other: Self) {
        self.newly_dirty += other.newly_dirty;
        self.times += other.times;
    }
}

/// The parts of a sync's time. Parts that ran in parallel share the elapsed time, so the sum is wall time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncTimes {
    /// Time of the kernel: GET_DIRTY_LOG, PAGEMAP_SCAN, walking dirty rings.
    pub kernel: Duration,
    /// Time to read and clear vhost logs.
    pub vhost: Duration,
    /// Time to merge words whose first page in the block is a multiple of 64.
    pub aligned: Duration,
    /// Time to merge all other words, which need a shift.
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
