//! Limits the memory of the disks' buffers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that the buffers of all disks may use together.
pub(super) struct Budget {
    limit_bytes: u64,
    used: AtomicU64,
    most: AtomicU64,
}

impl Budget {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, used: AtomicU64::new(0), most: AtomicU64::new(0) }
    }

    /// Reserves `bytes`. Returns false if they exceed the limit.
    pub(super) fn take(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit_bytes);
        let Ok(before) = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits) else {
            return false;
        };
        self.most.fetch_max(before + bytes, Ordering::AcqRel);
        true
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// The most bytes that were reserved at any time.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Acquire)
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }
}
