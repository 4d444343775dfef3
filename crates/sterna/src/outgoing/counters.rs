//! What lanes count while they work; read by the control thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::stats::LaneTimes;

/// Totals since the migration began.
#[derive(Debug, Default)]
pub(super) struct Counters {
    main_bytes: AtomicU64,
    multifd_bytes: AtomicU64,
    zero_pages: AtomicU64,
    normal_pages: AtomicU64,
    absent_pages: AtomicU64,
    /// All that a lane does with pages that it has: scan, encode, moving and throttled.
    sending_nanos: AtomicU64,
    encode_nanos: AtomicU64,
    moving_nanos: AtomicU64,
    throttled_nanos: AtomicU64,
    idle_nanos: AtomicU64,
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
    pub times: LaneTimes,
    /// All that lanes did with pages that they had, summed over all lanes. Counted a little later than its parts.
    pub sending: Duration,
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
        add(&self.throttled_nanos, time);
    }

    /// A lane had pages to send for so long.
    pub fn sending(&self, time: Duration) {
        add(&self.sending_nanos, time);
    }

    /// Runs `encode`, which compresses.
    pub fn encoding<T>(&self, encode: impl FnOnce() -> T) -> T {
        timed(&self.encode_nanos, encode)
    }

    /// Runs `write`, which moves bytes.
    pub fn moving<T>(&self, write: impl FnOnce() -> T) -> T {
        timed(&self.moving_nanos, write)
    }

    /// Runs `wait`, in which a lane has nothing to do.
    pub fn idle<T>(&self, wait: impl FnOnce() -> T) -> T {
        timed(&self.idle_nanos, wait)
    }

    pub fn now(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            main_bytes: get(&self.main_bytes),
            multifd_bytes: get(&self.multifd_bytes),
            zero_pages: get(&self.zero_pages),
            normal_pages: get(&self.normal_pages),
            absent_pages: get(&self.absent_pages),
            times: self.times(),
            sending: Duration::from_nanos(get(&self.sending_nanos)),
        }
    }

    /// Looking at a clock before and after each scan would cost as much as a scan: it is what the rest leaves.
    fn times(&self) -> LaneTimes {
        let get = |counter: &AtomicU64| Duration::from_nanos(counter.load(Ordering::Relaxed));
        let (encode, moving) = (get(&self.encode_nanos), get(&self.moving_nanos));
        let (throttled, idle) = (get(&self.throttled_nanos), get(&self.idle_nanos));
        let scan = get(&self.sending_nanos).saturating_sub(encode + moving + throttled);
        LaneTimes { scan, encode, moving, throttled, idle }
    }
}

fn timed<T>(counter: &AtomicU64, act: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = act();
    add(counter, began.elapsed());
    result
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
}
