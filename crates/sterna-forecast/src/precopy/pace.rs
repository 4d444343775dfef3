//! Measures how fast lanes have sent pages recently.
//!
//! Times are means over all lanes, and counters are sums over all lanes. So a counter divided by a time is the rate
//! of all lanes together. The weight of older windows halves with every [`HALF_LIFE`], so that decisions follow a new
//! load within a second. Displayed values fade more slowly ([`SHOWN_HALF_LIFE`]). If lanes share CPUs with the guest,
//! rates of two successive seconds differ by a third, and a steady load must give steady displayed values.
//!
//! While `max-bandwidth` slows lanes down, they write in bursts, which sockets accept as fast as memory is copied. So
//! the bandwidth of the network without the limit is unknown, and every estimate uses the limit, unless an operator
//! sets `avail-switchover-bandwidth`. Zero pages need almost no bytes, so they do not show the pace of pages with
//! content. Until a page with content was sent, lanes are assumed to send at [`UNTRIED`].

use std::time::Duration;

use sterna_wire::PAGE_SIZE;

use super::counts::Counts;
use super::downtime::MARGIN;

/// Half-life of a window's weight in decisions.
pub const HALF_LIFE: Duration = Duration::from_millis(400);
/// Half-life of a window's weight in displayed values.
pub const SHOWN_HALF_LIFE: Duration = Duration::from_secs(2);
/// Minimum and maximum of the margin, relative to the usual time for the remaining pages.
const LEAST_MARGIN: f64 = MARGIN;
const MOST_MARGIN: f64 = 1.0;
/// Bandwidth that is assumed before any page was sent, in bytes per second: 1 Gbit/s.
const UNTRIED: f64 = 125e6;
/// Maximum of estimated times, in seconds: one year.
pub const LONGEST: f64 = 3.2e7;

/// Weighted sums in which older windows fade.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    half_life: Duration,
    bytes: f64,
    moving: f64,
    encode: f64,
    /// Time of scans and re-arming, and the number of pages. Zero pages need this time as well.
    look: f64,
    normal: f64,
    pages: f64,
    /// Bytes of pages with content, and of device streams.
    content: f64,
    /// Mean relative deviation of a window's seconds per byte from the average. It fades, too.
    deviation: f64,
}

impl Pace {
    /// A pace without measurements.
    pub fn fading(half_life: Duration) -> Self {
        Self {
            half_life,
            bytes: 0.0,
            moving: 0.0,
            encode: 0.0,
            look: 0.0,
            normal: 0.0,
            pages: 0.0,
            content: 0.0,
            deviation: 0.0,
        }
    }

    /// Adds the difference of two counters, `passed` apart, on `channels` lanes.
    pub fn and(&self, before: Counts, after: Counts, passed: Duration, channels: u32) -> Self {
        let times = (after.times - before.times) / channels;
        let keep = 0.5f64.powf(passed.as_secs_f64() / self.half_life.as_secs_f64());
        let mut sum = Self {
            look: self.look * keep + (times.scan + times.rearm).as_secs_f64(),
            pages: self.pages * keep + after.pages().saturating_sub(before.pages()) as f64,
            ..*self
        };
        let normal = after.normal_pages.saturating_sub(before.normal_pages) as f64;
        let content = after.content_bytes().saturating_sub(before.content_bytes()) as f64;
        if content == 0.0 && self.content > 0.0 {
            // A window with only zero pages does not show the cost of a page with content.
            return sum;
        }
        let bytes = after.bytes().saturating_sub(before.bytes()) as f64;
        let moving = times.moving.as_secs_f64();
        sum.bytes = self.bytes * keep + bytes;
        sum.moving = self.moving * keep + moving;
        sum.encode = self.encode * keep + times.encode.as_secs_f64();
        sum.normal = self.normal * keep + normal;
        sum.content = self.content * keep + content;
        let usual = self.moving / self.bytes;
        if usual.is_finite() && usual > 0.0 && bytes > 0.0 {
            let off = (moving / bytes / usual - 1.0).abs().min(MOST_MARGIN);
            sum.deviation = self.deviation * keep + off * (1.0 - keep);
        }
        sum
    }

    /// The same estimates, with less weight in later ones.
    pub(crate) fn faded(&self, passed: Duration) -> Self {
        let keep = 0.5f64.powf(passed.as_secs_f64() / self.half_life.as_secs_f64());
        Self {
            bytes: self.bytes * keep,
            moving: self.moving * keep,
            encode: self.encode * keep,
            look: self.look * keep,
            normal: self.normal * keep,
            pages: self.pages * keep,
            content: self.content * keep,
            ..*self
        }
    }

    /// Whether enough was sent for an estimate.
    pub fn is_tried(&self) -> bool {
        self.content > 0.0
    }

    /// Bytes per second of the time in which bytes moved. 0 before the first byte.
    pub fn bandwidth_bytes(&self) -> u64 {
        rate(self.bytes, self.moving)
    }

    /// Bytes of dirty memory that the lanes send per second. 0 before the first page.
    pub fn drain_bytes(&self) -> u64 {
        rate(PAGE_SIZE as f64, self.seconds_per_page())
    }

    /// Estimates the time for `pages` pages with content, with at most `max_bandwidth_bytes` per second (0: no limit).
    /// None before any measurement.
    pub fn time_for(&self, pages: u64, max_bandwidth_bytes: u64) -> Option<Duration> {
        let own = self.seconds_per_page();
        let seconds = pages as f64 * own.max(held_back(max_bandwidth_bytes));
        (own > 0.0).then(|| Duration::try_from_secs_f64(seconds.min(LONGEST)).unwrap_or_default())
    }

    /// The safety margin, relative to [`Pace::time_for`]. If the bandwidth limit determines the time, variations of
    /// faster lanes have no effect.
    pub fn margin(&self, max_bandwidth_bytes: u64) -> f64 {
        let own = (3.0 * self.deviation).clamp(LEAST_MARGIN, MOST_MARGIN);
        let (each, held) = (self.seconds_per_page(), held_back(max_bandwidth_bytes));
        if held > each { (each * (1.0 + own) / held - 1.0).max(LEAST_MARGIN) } else { own }
    }

    /// Seconds for a page with content. Zero pages only contribute the cost of a scan.
    fn seconds_per_page(&self) -> f64 {
        // Zero pages need time but almost no bytes.
        let by_bytes = self.moving / self.bytes * PAGE_SIZE as f64;
        let send = if !self.is_tried() && by_bytes.is_finite() {
            PAGE_SIZE as f64 / UNTRIED
        } else if self.normal > 0.0 {
            ((self.moving + self.encode) / self.normal).min(by_bytes + self.encode / self.normal)
        } else {
            by_bytes
        };
        let look = if self.pages > 0.0 { self.look / self.pages } else { 0.0 };
        if send.is_finite() { send + look } else { look }
    }
}

/// Seconds per page at the bandwidth limit.
fn held_back(max_bandwidth_bytes: u64) -> f64 {
    if max_bandwidth_bytes > 0 { PAGE_SIZE as f64 / max_bandwidth_bytes as f64 } else { 0.0 }
}

fn rate(count: f64, seconds: f64) -> u64 {
    if seconds > 0.0 { (count / seconds) as u64 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane_times::LaneTimes;

    const MS: Duration = Duration::from_millis(1);

    fn counts(windows: u32, bytes: u64, moving: Duration, idle: Duration) -> Counts {
        let times = LaneTimes { moving: moving * windows, idle: idle * windows, ..LaneTimes::default() };
        let bytes = bytes * u64::from(windows);
        Counts { multifd_bytes: bytes, normal_pages: bytes / 4096, times, ..Counts::default() }
    }

    fn steady(bytes: u64, moving: Duration, idle: Duration) -> Pace {
        (0..20).fold(Pace::fading(HALF_LIFE), |pace, window| {
            let (before, after) =
                (counts(window, bytes, moving, idle), counts(window + 1, bytes, moving, idle));
            pace.and(before, after, 100 * MS, 1)
        })
    }

    #[test]
    fn bandwidth_counts_only_the_time_in_which_bytes_moved() {
        let pace = steady(4096 * 1000, 10 * MS, 90 * MS);

        assert!(pace.bandwidth_bytes().abs_diff(409_600_000) < 100, "{}", pace.bandwidth_bytes());
        assert_eq!(pace.time_for(1000, 0).unwrap().as_millis(), 10);
    }

    #[test]
    fn steady_load_leaves_the_least_margin() {
        assert_eq!(steady(4096 * 1000, 10 * MS, Duration::ZERO).margin(0), LEAST_MARGIN);
    }

    #[test]
    fn what_fades_slowly_strays_less_under_a_load_that_jumps() {
        let strays = |half_life| {
            let (mut pace, mut total) = (Pace::fading(half_life), Counts::default());
            let mut readings = Vec::new();
            for window in 0..60 {
                let mut next = total;
                next.multifd_bytes += 4096 * 1000;
                next.normal_pages += 1000;
                // Half a second fast, then half a second slow.
                next.times.moving += if window / 5 % 2 == 0 { 8 * MS } else { 12 * MS };
                pace = pace.and(total, next, 100 * MS, 1);
                total = next;
                readings.push(pace.bandwidth_bytes() as f64);
            }
            let late = &readings[20..];
            let most = late.iter().copied().fold(0.0, f64::max);
            most / late.iter().copied().fold(f64::INFINITY, f64::min)
        };

        let (decided, shown) = (strays(HALF_LIFE), strays(SHOWN_HALF_LIFE));

        assert!(decided > 1.15 && shown < 1.1, "{decided} {shown}");
    }

    #[test]
    fn jumping_load_widens_the_margin() {
        let (mut pace, mut total) = (Pace::fading(HALF_LIFE), Counts::default());
        for window in 0..20 {
            let mut next = total;
            next.multifd_bytes += 4096 * 1000;
            next.normal_pages += 1000;
            next.times.moving += if window % 2 == 0 { 5 * MS } else { 15 * MS };
            pace = pace.and(total, next, 100 * MS, 1);
            total = next;
        }

        assert!(pace.margin(0) > 0.5, "{pace:?}");
    }

    #[test]
    fn zero_pages_do_not_make_pages_with_content_look_cheap() {
        let before = counts(1, 4096 * 1000, 10 * MS, Duration::ZERO);
        let mut after = counts(2, 4096 * 1000, 10 * MS, Duration::ZERO);
        after.zero_pages += 1_000_000;

        let pace = Pace::fading(HALF_LIFE).and(before, after, 100 * MS, 1);

        assert_eq!(pace.time_for(1000, 0).unwrap().as_millis(), 10);
    }

    #[test]
    fn zero_pages_alone_do_not_make_pages_with_content_look_dear() {
        let mut pace = steady(4096 * 1000, 10 * MS, Duration::ZERO);
        let mut total = counts(20, 4096 * 1000, 10 * MS, Duration::ZERO);
        for _ in 0..300 {
            let mut next = total;
            next.zero_pages += 1000;
            next.multifd_bytes += 8000;
            next.times.moving += 5 * MS;
            pace = pace.and(total, next, 100 * MS, 1);
            total = next;
        }

        assert_eq!(pace.time_for(1000, 0).unwrap().as_millis(), 10);
    }

    #[test]
    fn zero_pages_alone_say_nothing_of_what_a_network_carries() {
        let after = Counts { zero_pages: 1000, multifd_bytes: 8000, ..Counts::default() };
        let times = LaneTimes { moving: 5 * MS, ..LaneTimes::default() };

        let pace = Pace::fading(HALF_LIFE).and(Counts::default(), Counts { times, ..after }, 100 * MS, 1);

        assert!(!pace.is_tried());
        assert_eq!(pace.time_for(1000, 0).unwrap().as_millis(), 32);
    }

    #[test]
    fn chunks_of_devices_streams_tell_as_pages_do() {
        let (before, mut after) = (
            counts(1, 4096 * 1000, 10 * MS, Duration::ZERO),
            counts(2, 4096 * 1000, 40 * MS, Duration::ZERO),
        );
        after.normal_pages = before.normal_pages;
        after.chunk_bytes = 4096 * 1000;

        let alone =
            Pace::fading(HALF_LIFE).and(Counts::default(), Counts { normal_pages: 0, ..after }, 100 * MS, 1);
        let beside = Pace::fading(HALF_LIFE).and(Counts::default(), before, 100 * MS, 1).and(
            before,
            after,
            Duration::ZERO,
            1,
        );

        assert!(alone.is_tried());
        assert_eq!(alone.time_for(2000, 0).unwrap().as_millis(), 80);
        assert_eq!(beside.time_for(2000, 0).unwrap().as_millis(), 80);
    }

    #[test]
    fn rest_goes_no_faster_than_max_bandwidth_however_fast_bursts_go_into_sockets() {
        // 4 MB in each window of 100 ms, at 4 GB/s. The pace varies, as with copies in memory.
        let (mut pace, mut total) = (Pace::fading(HALF_LIFE), Counts::default());
        for window in 0..20 {
            let mut next = total;
            next.multifd_bytes += 4_096_000;
            next.normal_pages += 1000;
            next.times.moving += if window % 2 == 0 { MS / 2 } else { 3 * MS / 2 };
            next.times.throttled += 99 * MS;
            pace = pace.and(total, next, 100 * MS, 1);
            total = next;
        }

        let limit = 40_960_000;
        assert!(pace.bandwidth_bytes() > 3_000_000_000, "{pace:?}");
        assert_eq!(pace.time_for(1000, limit).unwrap().as_millis(), 100);
        assert_eq!(pace.margin(limit), LEAST_MARGIN);
        assert!(pace.margin(0) > 0.5, "{pace:?}");
        // A limit above the pace of lanes has no effect.
        assert_eq!(pace.time_for(1000, 100 * limit), pace.time_for(1000, 0));
    }

    #[test]
    fn scan_and_re_arming_belong_to_a_page() {
        let mut after = counts(1, 4096 * 1000, 10 * MS, Duration::ZERO);
        after.times.scan = 2 * MS;
        after.times.rearm = 3 * MS;

        let pace = Pace::fading(HALF_LIFE).and(Counts::default(), after, 100 * MS, 1);

        assert_eq!(pace.time_for(1000, 0).unwrap().as_millis(), 15);
    }

    #[test]
    fn nothing_measured_gives_no_time_and_no_rate() {
        let pace = Pace::fading(HALF_LIFE);

        assert_eq!((pace.bandwidth_bytes(), pace.drain_bytes()), (0, 0));
        assert_eq!(pace.time_for(1000, 0), None);
    }
}
