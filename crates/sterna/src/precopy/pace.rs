//! How fast lanes get rid of pages, as they did lately.
//!
//! Times are per lane on average, counts are of all lanes, so that a count over a time is what all of them do together.
//! Older windows count less: half after [`HALF_LIFE`]. What is decided so follows a new load within a second. What is
//! shown fades more slowly ([`SHOWN_HALF_LIFE`]): where lanes share processors with the guest one second differs from
//! the next by a third, and a steady load shall give steady readings.
//!
//! While `max-bandwidth` slows lanes down they write in bursts, which sockets accept as fast as memory is copied. So it is
//! unknown what the network would carry without the limit, and every estimate uses the limit, unless an operator states
//! the bandwidth (`avail-switchover-bandwidth`). Zero pages, of which hardly a byte goes out,
//! say nothing of pages with content: until one was sent, lanes are taken to do [`UNTRIED`].

use std::time::Duration;

use sterna_ram::PAGE_SIZE;

use super::counts::Counts;
use super::downtime::MARGIN;

pub(crate) const HALF_LIFE: Duration = Duration::from_millis(400);
pub(crate) const SHOWN_HALF_LIFE: Duration = Duration::from_secs(2);
/// How much longer than usual the remaining pages may take, at least and at most, relative to it.
const LEAST_MARGIN: f64 = MARGIN;
const MOST_MARGIN: f64 = 1.0;
/// Bytes per second that are assumed for a network before anything was sent: those of 1 Gbit/s.
const UNTRIED: f64 = 125e6;
/// A year, in seconds: longer makes no difference.
pub(crate) const LONGEST: f64 = 3.2e7;

/// Sums that fade.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    half_life: Duration,
    bytes: f64,
    moving: f64,
    encode: f64,
    /// Scans and re-arming, which zero pages cost as well, and the pages that they were for.
    look: f64,
    normal: f64,
    pages: f64,
    /// Bytes of pages with content, and of devices' streams.
    content: f64,
    /// How far a window's seconds per byte lie from the average, relative to it; fades too.
    deviation: f64,
}

impl Pace {
    /// Of nothing so far.
    pub(crate) fn fading(half_life: Duration) -> Self {
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

    /// With what happened between two counts, `passed` apart, on `channels` lanes.
    pub(crate) fn and(&self, before: Counts, after: Counts, passed: Duration, channels: u32) -> Self {
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
            // Zero pages alone say nothing of what a page with content costs.
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

    /// Whether anything was sent from which an estimate can be made.
    pub(crate) fn is_tried(&self) -> bool {
        self.content > 0.0
    }

    /// Bytes per second while bytes moved; 0 before any did.
    pub(crate) fn bandwidth_bytes(&self) -> u64 {
        rate(self.bytes, self.moving)
    }

    /// Bytes of dirty memory per second that the lanes get rid of; 0 before any were.
    pub(crate) fn drain_bytes(&self) -> u64 {
        rate(PAGE_SIZE as f64, self.seconds_per_page())
    }

    /// How long `pages` pages will take if none of them is zero and no more than `max_bandwidth_bytes` a second go
    /// out (0: no limit); None before anything was measured.
    pub(crate) fn time_for(&self, pages: u64, max_bandwidth_bytes: u64) -> Option<Duration> {
        let own = self.seconds_per_page();
        let seconds = pages as f64 * own.max(held_back(max_bandwidth_bytes));
        (own > 0.0).then(|| Duration::try_from_secs_f64(seconds.min(LONGEST)).unwrap_or_default())
    }

    /// How much longer it may well take, relative to [`Pace::time_for`]. Where the limit decides, lanes that stray
    /// below it change nothing.
    pub(crate) fn margin(&self, max_bandwidth_bytes: u64) -> f64 {
        let own = (3.0 * self.deviation).clamp(LEAST_MARGIN, MOST_MARGIN);
        let (each, held) = (self.seconds_per_page(), held_back(max_bandwidth_bytes));
        if held > each { (each * (1.0 + own) / held - 1.0).max(LEAST_MARGIN) } else { own }
    }

    /// Of a page with content. Zero pages, which cost little, say nothing of it but what a scan costs.
    fn seconds_per_page(&self) -> f64 {
        // Zero pages take time as well, and hardly any bytes.
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

/// Seconds per page at the limit.
fn held_back(max_bandwidth_bytes: u64) -> f64 {
    if max_bandwidth_bytes > 0 { PAGE_SIZE as f64 / max_bandwidth_bytes as f64 } else { 0.0 }
}

fn rate(count: f64, seconds: f64) -> u64 {
    if seconds > 0.0 { (count / seconds) as u64 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::LaneTimes;

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
                // Half a second fast, half a second slow.
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
        // 4 MB in each window of 100 ms, at 4 GB/s; the pace strays, as that of copies does.
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
        // A limit above what lanes do changes nothing.
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
