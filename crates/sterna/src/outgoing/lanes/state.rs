//! How far lanes are.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::order::RoundQueue;

/// What all lanes of a migration share, and what the control thread sees of them.
pub(in crate::outgoing) struct Lanes {
    /// Hands rounds to the lanes.
    pub queue: RoundQueue,
    /// Per lane: 1 + the last round whose barrier is written; 0: not even the opening one.
    finished: Vec<AtomicU64>,
}

impl Lanes {
    pub(crate) fn new(count: usize) -> Self {
        Self { queue: RoundQueue::default(), finished: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.finished.len()
    }

    /// Lanes begin again, over other channels. None works now.
    pub(crate) fn restart(&self) {
        self.finished.iter().for_each(|lane| lane.store(0, Ordering::Release));
        self.queue.reopen();
    }

    /// Whether every lane has written its barrier after round `number`; 0 is the opening one.
    pub(crate) fn are_through(&self, number: u64) -> bool {
        self.finished.iter().all(|lane| lane.load(Ordering::Acquire) > number)
    }

    /// Lane `index` has written its barrier after round `number`.
    pub(crate) fn finish(&self, index: usize, number: u64) {
        self.finished[index].store(number + 1, Ordering::Release);
    }
}
