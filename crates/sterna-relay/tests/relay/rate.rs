//! The estimator of bytes in flight, against a link of a known rate and delay.

use std::collections::VecDeque;
use std::time::Duration;

use sterna_relay::session::{RateEstimator, Stamp};

const CHUNK: u64 = 64 << 10;
const TICK: Duration = Duration::from_micros(100);

/// A link that a source fills as far as the limit permits.
struct Link {
    estimator: RateEstimator,
    now: Duration,
    /// Bytes per second, one way delay, and how many bytes pass at a time.
    rate: u64,
    delay: Duration,
    burst: u64,
    tokens: f64,
    /// Taken and not yet passed on; then passed on and on the way.
    queue: VecDeque<(u64, Stamp)>,
    way: VecDeque<(Duration, u64, Stamp)>,
    in_flight: u64,
    /// The largest time that a byte waited in the queue, since it was last reset.
    waited: Duration,
    passed: u64,
}

impl Link {
    fn new(rate: u64, delay: Duration, burst: u64) -> Self {
        let estimator = RateEstimator::new();
        let (now, waited) = (Duration::ZERO, Duration::ZERO);
        let (queue, way) = (VecDeque::new(), VecDeque::new());
        Self { estimator, now, rate, delay, burst, tokens: 0.0, queue, way, in_flight: 0, waited, passed: 0 }
    }

    /// Runs for `time`. `offered`: bytes per second that the source has.
    fn run(&mut self, time: Duration, offered: u64) {
        let (until, mut has) = (self.now + time, 0.0);
        (self.waited, self.passed) = (Duration::ZERO, 0);
        while self.now < until {
            self.now += TICK;
            has = (has + offered as f64 * TICK.as_secs_f64()).min(8e6);
            while has >= CHUNK as f64 && self.in_flight + CHUNK <= self.estimator.limit() {
                let stamp = self.estimator.taken(self.now, self.in_flight);
                self.queue.push_back((CHUNK, stamp));
                self.in_flight += CHUNK;
                has -= CHUNK as f64;
            }
            self.tokens =
                (self.tokens + self.rate as f64 * TICK.as_secs_f64()).min((self.burst + CHUNK) as f64);
            if self.tokens >= self.burst as f64 || self.way.back().is_some_and(|(at, ..)| *at >= self.now) {
                while self.tokens >= CHUNK as f64
                    && let Some((bytes, stamp)) = self.queue.pop_front()
                {
                    self.tokens -= bytes as f64;
                    self.way.push_back((self.now + self.delay * 2, bytes, stamp));
                }
            }
            while self.way.front().is_some_and(|(at, ..)| *at <= self.now)
                && let Some((_, bytes, stamp)) = self.way.pop_front()
            {
                self.in_flight -= bytes;
                self.passed += bytes;
                self.estimator.delivered(self.now, bytes);
                self.estimator.sample(self.now, stamp);
            }
            let waiting = self.queue.iter().map(|(bytes, _)| bytes).sum::<u64>();
            self.waited = self.waited.max(Duration::from_secs_f64(waiting as f64 / self.rate as f64));
        }
    }
}

#[test]
fn rate_of_a_full_link_is_found_and_little_waits() {
    for (megabytes, delay_ms) in [(10, 0), (50, 0), (200, 0), (50, 10), (200, 25), (1000, 1)] {
        let rate = megabytes * 1_000_000;
        let mut link = Link::new(rate, Duration::from_millis(delay_ms), CHUNK);
        link.run(Duration::from_secs(10), 4 * rate);
        link.run(Duration::from_secs(2), 4 * rate);
        let found = link.estimator.bytes_per_second();
        let shown = format!("{megabytes} MB/s, {delay_ms} ms: {found} B/s, {:?} waited", link.waited);
        assert!(found > rate * 9 / 10 && found < rate * 5 / 4, "{shown}");
        assert!(link.passed > rate * 2 * 9 / 10, "{shown}: the link stays full, {} passed", link.passed);
        // 64 KiB are in flight at least, which is 6.5 ms at 10 MB/s.
        assert!(link.waited < Duration::from_millis(20), "{shown}");
    }
}

#[test]
fn rate_of_a_link_with_bursts_is_its_average() {
    let rate = 50_000_000;
    let mut link = Link::new(rate, Duration::ZERO, 200 << 10);
    link.run(Duration::from_secs(10), 4 * rate);
    let found = link.estimator.bytes_per_second();
    assert!(found < rate * 3 / 2, "{found}");
}

#[test]
fn rate_of_a_link_that_becomes_slower_falls_within_a_second() {
    let mut link = Link::new(200_000_000, Duration::from_millis(1), CHUNK);
    link.run(Duration::from_secs(5), 1_000_000_000);
    link.rate = 50_000_000;
    link.run(Duration::from_secs(1), 1_000_000_000);
    link.run(Duration::from_secs(2), 1_000_000_000);
    let found = link.estimator.bytes_per_second();
    assert!((45_000_000..65_000_000).contains(&found), "{found}");
    assert!(link.waited < Duration::from_millis(20), "{:?}", link.waited);
}

#[test]
fn rate_of_a_source_that_has_little_does_not_lower_the_limit() {
    let mut link = Link::new(200_000_000, Duration::from_millis(5), CHUNK);
    link.run(Duration::from_secs(5), 1_000_000_000);
    let before = link.estimator.limit();
    link.run(Duration::from_secs(5), 1_000_000);
    assert!(link.estimator.limit() >= before / 2, "{before} {}", link.estimator.limit());
    link.run(Duration::from_secs(1), 1_000_000_000);
    assert!(link.passed > 180_000_000, "{}", link.passed);
}
