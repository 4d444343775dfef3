//! The progress of the lanes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::order::RoundQueue;

/// State that all lanes of a migration share, and that the control thread reads.
pub(in crate::outgoing) struct Lanes {
    /// Distributes rounds to the lanes.
    pub queue: RoundQueue,
    /// For each lane, 1 + the last round whose barrier is written.
    ///
    /// The value 0 means that no barrier is written yet.
    finished: Vec<AtomicU64>,
}

impl Lanes {
    pub(crate) fn new(count: usize) -> Self {
        Self { queue: RoundQueue::default(), finished: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// The number of lanes.
    pub(crate) fn count(&self) -> usize {
        self.finished.len()
    }

    /// Resets the progress for lanes of another session. No lane works now.
    #[cfg(feature = "reconnect")]
    pub(crate) fn restart(&self) {
        self.finished.iter().for_each(|lane| lane.store(0, Ordering::Release));
        self.queue.reopen();
    }

    /// Whether every lane has written its barrier after round `number`; 0 is the opening barrier.
    pub(crate) fn are_through(&self, number: u64) -> bool {
        self.finished.iter().all(|lane| lane.load(Ordering::Acquire) > number)
    }

    /// Records that lane `index` has written its barrier after round `number`.
    pub(crate) fn finish(&self, index: usize, number: u64) {
        self.finished[index].store(number + 1, Ordering::Release);
    }
}
