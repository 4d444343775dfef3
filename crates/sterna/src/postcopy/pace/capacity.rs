//! Estimates how many bytes per second the network carries, from the deliveries.
//!
//! Bytes that are delivered at the rate at which they were sent show only that the network carries *at least*
//! this rate. An estimate that followed these deliveries would follow its own pace, which is slightly below it,
//! and would shrink without end. Therefore deliveries at the own pace can only raise the estimate. Only a
//! verdict about a queue lowers it.

use std::collections::VecDeque;

/// Windows that are averaged, because acknowledgements arrive in bursts: while the kernel sends as fast as it
/// can, and later while the lanes are paced.
const FREE_WINDOWS: usize = 8;
const PACED_WINDOWS: usize = 8;
/// If an earlier window has less than this share of the present delivery, TCP was still starting then.
const BEGUN: f64 = 0.8;
/// Factor for an estimate that proved too high. A queue that drains shows this, but not by how much.
const STEP: f64 = 0.97;

/// The estimated capacity, in bytes per second.
#[derive(Default)]
pub(super) struct Capacity {
    bytes_per_second: f64,
    recent: VecDeque<f64>,
    is_paced: bool,
}

impl Capacity {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.bytes_per_second
    }

    /// Raises the estimate by a measurement over a longer time: all deliveries before the pacing, or the
    /// deliveries of a probe.
    pub(super) fn is_at_least(&mut self, delivered: f64) {
        self.bytes_per_second = self.bytes_per_second.max(delivered);
    }

    /// Evaluates a window in which the kernel sent as fast as it could. `is_queued`: a queue existed during the
    /// whole window.
    pub(super) fn delivered_freely(&mut self, delivered: f64, is_queued: bool) {
        if !is_queued {
            self.bytes_per_second = self.bytes_per_second.max(delivered);
            return;
        }
        self.recent.retain(|before| *before >= delivered * BEGUN);
        self.push(delivered, FREE_WINDOWS);
        self.bytes_per_second = mean(&self.recent);
    }

    /// Evaluates a window in which the pace limited the sending.
    pub(super) fn delivered_paced(&mut self, delivered: f64) {
        if !self.is_paced {
            (self.is_paced, self.recent) = (true, VecDeque::new());
        }
        self.push(delivered, PACED_WINDOWS);
        if self.recent.len() == PACED_WINDOWS {
            self.bytes_per_second = self.bytes_per_second.max(mean(&self.recent));
        }
    }

    /// Lowers the estimate to `delivered`: a queue existed although the rate was within the estimate.
    pub(super) fn is_less(&mut self, delivered: f64) {
        self.bytes_per_second = delivered;
        self.recent.clear();
    }

    /// Lowers the estimate by [`STEP`]: a queue existed, and it drained when less was sent.
    pub(super) fn was_exceeded(&mut self) {
        self.bytes_per_second *= STEP;
        self.recent.clear();
    }

    fn push(&mut self, delivered: f64, most: usize) {
        self.recent.truncate(most - 1);
        self.recent.push_front(delivered);
    }
}

fn mean(windows: &VecDeque<f64>) -> f64 {
    windows.iter().sum::<f64>() / windows.len().max(1) as f64
}
