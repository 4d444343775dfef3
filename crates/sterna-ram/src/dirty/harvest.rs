//! What a harvest says about itself.

use std::ops::AddAssign;
use std::time::Duration;

/// What a harvest found, and what it cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Harvest {
    /// Pages whose bit was clear in the bitmap and is set now.
    pub newly_dirty: u64,
    /// Where its time went.
    pub times: SyncTimes,
}

impl AddAssign for Harvest {
    fn add_assign(&mut self, other: Self) {
        self.newly_dirty += other.newly_dirty;
        self.times += other.times;
    }
}

/// Where the time of a harvest went. Parts that ran at the same time on several threads share out the time
/// that passed, so the total is that of a clock on the wall.
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
    /// Counts time that went into merging words moved up by `bits` bits.
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
