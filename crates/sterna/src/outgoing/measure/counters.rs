//! Counters that lanes update while they work, and that the control thread reads.
//!
//! Encoding, moving, waiting and re-arming are timed directly. The scan is the rest of a lane's time
//! ([`ScanClock`]). Reading a clock before and after each scan would cost as much as a scan.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::precopy::Counts;
use crate::stats::LaneTimes;

/// Totals since the migration began.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct Counters {
    main_bytes: AtomicU64,
    multifd_bytes: AtomicU64,
    zero_pages: AtomicU64,
    normal_pages: AtomicU64,
    absent_pages: AtomicU64,
    free_pages: AtomicU64,
    chunk_bytes: AtomicU64,
    scan_nanos: AtomicU64,
    rearm_nanos: AtomicU64,
    encode_nanos: AtomicU64,
    moving_nanos: AtomicU64,
    throttled_nanos: AtomicU64,
    idle_nanos: AtomicU64,
}

impl Counters {
    pub(crate) fn main(&self, bytes: u64) {
        self.main_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn multifd(&self, bytes: u64) {
        self.multifd_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn pages(&self, normal: u64, zero: u64) {
        self.normal_pages.fetch_add(normal, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero, Ordering::Relaxed);
    }

    pub(crate) fn absent(&self, pages: u64) {
        self.absent_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Adds pages that were not sent because the guest does not use them.
    pub(crate) fn free(&self, pages: u64) {
        if pages > 0 {
            self.free_pages.fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// The number of pages that were not sent because the guest does not use them.
    pub(crate) fn free_pages(&self) -> u64 {
        self.free_pages.load(Ordering::Relaxed)
    }

    /// Adds a chunk of a device's stream that was sent.
    pub(crate) fn chunk(&self, bytes: u64) {
        self.chunk_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds time in which the bandwidth limit blocked a lane.
    pub(crate) fn throttled(&self, time: Duration) {
        part(&self.throttled_nanos, time);
    }

    /// Adds time in which a lane re-armed, or waited for another lane that did.
    pub(crate) fn rearming(&self, time: Duration) {
        if !time.is_zero() {
            part(&self.rearm_nanos, time);
        }
    }

    /// Runs `encode`, and counts its time as compression.
    pub(crate) fn encoding<T>(&self, encode: impl FnOnce() -> T) -> T {
        timed(&self.encode_nanos, encode)
    }

    /// Runs `write`, and counts its time as moving of bytes.
    pub(crate) fn moving<T>(&self, write: impl FnOnce() -> T) -> T {
        timed(&self.moving_nanos, write)
    }

    /// Adds time in which bytes moved while the lane did other work.
    #[cfg(feature = "rdma")]
    pub(crate) fn moved(&self, time: Duration) {
        add(&self.moving_nanos, time);
    }

    /// Runs `wait`, in which a lane waits for bytes in flight. [`Counters::moved`] counts that time.
    #[cfg(feature = "rdma")]
    pub(crate) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        PARTS.set(PARTS.get() + began.elapsed());
        result
    }

    /// Runs `wait`, in which a lane has no work.
    pub(crate) fn idle<T>(&self, wait: impl FnOnce() -> T) -> T {
        timed(&self.idle_nanos, wait)
    }

    pub(crate) fn now(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            main_bytes: get(&self.main_bytes),
            multifd_bytes: get(&self.multifd_bytes),
            zero_pages: get(&self.zero_pages),
            normal_pages: get(&self.normal_pages),
            absent_pages: get(&self.absent_pages),
            chunk_bytes: get(&self.chunk_bytes),
            times: self.times(),
        }
    }

    fn times(&self) -> LaneTimes {
        let get = |counter: &AtomicU64| Duration::from_nanos(counter.load(Ordering::Relaxed));
        LaneTimes {
            scan: get(&self.scan_nanos),
            rearm: get(&self.rearm_nanos),
            encode: get(&self.encode_nanos),
            moving: get(&self.moving_nanos),
            throttled: get(&self.throttled_nanos),
            idle: get(&self.idle_nanos),
        }
    }
}

/// Measures the scan time of a lane: its time with pages, less the timed parts.
///
/// It reads the clock only once per several pages. It belongs to the thread that created it.
pub(in crate::outgoing) struct ScanClock<'a> {
    counters: &'a Counters,
    since: Instant,
    parts: Duration,
    pages: u64,
}

impl<'a> ScanClock<'a> {
    const EVERY_PAGES: u64 = 512;

    pub(crate) fn new(counters: &'a Counters) -> Self {
        Self { counters, since: Instant::now(), parts: PARTS.get(), pages: 0 }
    }

    /// Counts `count` pages that the lane has taken.
    pub(crate) fn pages(&mut self, count: u64) {
        self.pages += count;
        if self.pages >= Self::EVERY_PAGES {
            self.read();
        }
    }

    fn read(&mut self) {
        let (now, parts) = (Instant::now(), PARTS.get());
        let scan = (now - self.since).saturating_sub(parts.saturating_sub(self.parts));
        add(&self.counters.scan_nanos, scan);
        (self.since, self.parts, self.pages) = (now, parts, 0);
    }
}

impl Drop for ScanClock<'_> {
    fn drop(&mut self) {
        self.read();
    }
}

thread_local! {
    /// The time that this lane's thread has spent on parts that are timed directly.
    static PARTS: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn timed<T>(counter: &AtomicU64, act: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = act();
    part(counter, began.elapsed());
    result
}

fn part(counter: &AtomicU64, time: Duration) {
    add(counter, time);
    PARTS.set(PARTS.get() + time);
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_millis(10);

    fn sleep() -> Duration {
        std::thread::sleep(LONG);
        LONG
    }

    #[test]
    fn scan_is_what_all_that_is_timed_by_itself_leaves() {
        let counters = Counters::default();

        let began = Instant::now();
        let mut clock = ScanClock::new(&counters);
        counters.moving(sleep);
        counters.throttled(sleep());
        counters.rearming(sleep());
        sleep();
        // Parts of other lanes do not count for this one.
        std::thread::scope(|scope| scope.spawn(|| counters.encoding(sleep)).join()).unwrap();
        clock.pages(ScanClock::EVERY_PAGES);
        sleep();
        drop(clock);

        let (all, times) = (began.elapsed(), counters.now().times);
        assert_eq!((times.rearm, times.throttled), (LONG, LONG));
        assert!(times.scan >= LONG * 3, "{times:?}");
        assert!(times.scan + times.moving + times.throttled + times.rearm <= all, "{times:?} of {all:?}");
    }
}
