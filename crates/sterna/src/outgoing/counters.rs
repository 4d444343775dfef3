//! What lanes count while they work; read by the control thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Totals since the migration began.
#[derive(Debug, Default)]
pub(super) struct Counters {
    main_bytes: AtomicU64,
    multifd_bytes: AtomicU64,
    zero_pages: AtomicU64,
    normal_pages: AtomicU64,
    absent_pages: AtomicU64,
    throttled_nanos: AtomicU64,
}

/// [`Counters`] at one instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub main_bytes: u64,
    pub multifd_bytes: u64,
    pub zero_pages: u64,
    pub normal_pages: u64,
    pub absent_pages: u64,
    /// Summed over all lanes.
    pub throttled: Duration,
}

impl Counts {
    pub fn bytes(&self) -> u64 {
        self.main_bytes + self.multifd_bytes
    }

    pub fn pages(&self) -> u64 {
        self.zero_pages + self.normal_pages
    }
}

impl Counters {
    pub fn main(&self, bytes: u64) {
        self.main_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn multifd(&self, bytes: u64) {
        self.multifd_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn pages(&self, normal: u64, zero: u64) {
        self.normal_pages.fetch_add(normal, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero, Ordering::Relaxed);
    }

    pub fn absent(&self, pages: u64) {
        self.absent_pages.fetch_add(pages, Ordering::Relaxed);
    }

    pub fn throttled(&self, time: Duration) {
        self.throttled_nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub fn now(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            main_bytes: get(&self.main_bytes),
            multifd_bytes: get(&self.multifd_bytes),
            zero_pages: get(&self.zero_pages),
            normal_pages: get(&self.normal_pages),
            absent_pages: get(&self.absent_pages),
            throttled: Duration::from_nanos(get(&self.throttled_nanos)),
        }
    }
}
