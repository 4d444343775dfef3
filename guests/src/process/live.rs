//! Requests to running workers, and their progress.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::{ThrottleClock, ThrottleLimits, VmError};

use super::StopPoint;
use super::config::MOST_WORKERS;
use crate::model::{History, Pattern};

/// The progress of a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps that each worker has taken.
    pub steps: Vec<u64>,
    /// Beats of each worker. They advance even if the worker's pattern has no steps.
    pub beats: Vec<u64>,
    /// Whether each worker's present pattern has no steps.
    pub idle: Vec<bool>,
    /// The longest time between two beats of any worker.
    pub max_gap: Duration,
}

impl Progress {
    /// Sum of the steps of all workers.
    pub fn total_steps(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// Whether every worker has advanced by `more` steps since `before`. An idle worker must have advanced
    /// by `more` beats.
    pub fn is_beyond(&self, before: &Self, more: u64) -> bool {
        let gone_on = |worker: usize| {
            let by = |now: &[u64], then: &[u64]| {
                now[worker].saturating_sub(then.get(worker).copied().unwrap_or(0))
            };
            by(&self.steps, &before.steps) >= more
                || (self.idle[worker] && by(&self.beats, &before.beats) >= more)
        };
        !self.steps.is_empty() && (0..self.steps.len()).all(gone_on)
    }
}

/// Settings that workers read between steps.
#[derive(Debug)]
pub(super) struct Live {
    rate: AtomicU64,
    mid_page: AtomicBool,
    generation: AtomicU64,
    throttle_percent: AtomicU8,
    /// Bytes per second of each worker; 0: no limit.
    dirty_limits: Box<[AtomicU64]>,
    /// Number of changes of the two fields above.
    throttle_generation: AtomicU64,
    load: Mutex<(Pattern, Option<u64>)>,
}

impl Live {
    pub fn new(rate: u64, stop_point: StopPoint) -> Self {
        Self {
            rate: AtomicU64::new(rate),
            mid_page: AtomicBool::new(stop_point == StopPoint::MidPage),
            generation: AtomicU64::new(0),
            throttle_percent: AtomicU8::new(0),
            dirty_limits: (0..MOST_WORKERS).map(|_| AtomicU64::new(0)).collect(),
            throttle_generation: AtomicU64::new(0),
            load: Mutex::new((Pattern::Idle, None)),
        }
    }

    pub fn rate(&self) -> u64 {
        self.rate.load(Relaxed)
    }
    pub fn set_rate(&self, steps_per_second: u64) {
        self.rate.store(steps_per_second, Relaxed);
    }
    pub fn stop_point(&self) -> StopPoint {
        if self.mid_page.load(Relaxed) { StopPoint::MidPage } else { StopPoint::StepBoundary }
    }
    pub fn set_stop_point(&self, point: StopPoint) {
        self.mid_page.store(point == StopPoint::MidPage, Relaxed);
    }

    /// The limits that a worker's throttle must keep.
    pub fn throttle_limits(&self, worker: usize) -> ThrottleLimits {
        let bytes = self.dirty_limits[worker].load(Relaxed);
        ThrottleLimits {
            percent: self.throttle_percent.load(Relaxed),
            dirty_bytes_per_second: (bytes > 0).then_some(bytes),
        }
    }
    pub fn set_throttle_percent(&self, percent: u8) {
        self.throttle_percent.store(percent.min(ThrottleClock::PERCENT_MAX), Relaxed);
        self.throttle_generation.fetch_add(1, std::sync::atomic::Ordering::Release);
    }
    pub fn set_dirty_limit(&self, workers: std::ops::Range<usize>, bytes_per_second: Option<u64>) {
        for limit in &self.dirty_limits[workers] {
            limit.store(bytes_per_second.unwrap_or(0), Relaxed);
        }
        self.throttle_generation.fetch_add(1, std::sync::atomic::Ordering::Release);
    }
    /// Number of changes of the limits. A sleeping worker compares it with the number before its sleep, and
    /// reads the limits again.
    pub fn throttle_generation(&self) -> u64 {
        self.throttle_generation.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Number of requests. A worker that sees a new number reads [`Live::load`].
    pub fn generation(&self) -> u64 {
        self.generation.load(std::sync::atomic::Ordering::Acquire)
    }
    pub fn load(&self) -> (Pattern, Option<u64>) {
        *self.load.lock()
    }
    /// The caller must hold the phase's lock, so that requests are serialised.
    pub fn request(&self, pattern: Pattern, working_set_pages: Option<u64>) -> Result<(), VmError> {
        if self.generation() >= History::LIMIT as u64 - 1 {
            return Err(VmError::new(
                "set the pattern",
                format!("more than {} changes in one run", History::LIMIT),
            ));
        }
        *self.load.lock() = (pattern, working_set_pages);
        self.generation.fetch_add(1, std::sync::atomic::Ordering::Release);
        Ok(())
    }
}
