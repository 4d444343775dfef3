//! Computes how long a vCPU must sleep to keep its throttle and its dirty limit. A VMM needs this for
//! [`crate::Throttle`]. The functions are pure: the caller passes the time.
//!
//! # The model
//! The thread of a vCPU asks its [`ThrottleClock`] regularly, outside the guest, and sleeps for the returned time.
//! Two settings make a vCPU sleep; the longer sleep counts:
//! - *Throttling* by p percent: after each slice ([`ThrottleClock::SLICE`], 10 ms as in QEMU) the vCPU sleeps. The
//!   sleep is p / (100 − p) times as long as the vCPU ran.
//! - *A dirty limit*: every dirtied page costs the time that the limit allows for one page. If the vCPU is ahead of
//!   its limit, it sleeps for the difference. If it is below its limit, it saves up time, but at most [`CREDIT`].
//!
//! A vCPU that did not ask for a long time is treated as if it had run for two slices. So no single sleep is longer
//! than 99 times two slices, about 2 s, and the guest always makes progress. A vCPU therefore approaches, but does
//! not reach, a limit below a hundredth of its dirty rate.

use std::time::Duration;

/// Most time that a vCPU may save up by dirtying less than its limit.
const CREDIT: Duration = Duration::from_millis(50);
/// The shortest sleep. Smaller debts are collected.
const LEAST_SLEEP: Duration = Duration::from_millis(1);
const PAGE_BYTES: u64 = 4096;

/// The throttle and the dirty limit of one vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// Percentage of the time that the vCPU sleeps, at most 99.
    pub percent: u8,
    /// The most bytes that it may dirty per second, counted in pages of 4 KiB.
    pub dirty_bytes_per_second: Option<u64>,
}

impl ThrottleLimits {
    /// Whether neither limit is set.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Accounts for one vCPU's running time and dirtied pages. All times are since one fixed moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThrottleClock {
    awake_since: Duration,
    pages: u64,
    /// The moment up to which the dirtied pages have used the time that the limit allows.
    paid_until: Duration,
}

impl ThrottleClock {
    /// The longest time that a throttled vCPU runs between two sleeps, if its thread asks in time.
    pub const SLICE: Duration = Duration::from_millis(10);
    /// Maximum percentage of the time that a vCPU may sleep.
    pub const PERCENT_MAX: u8 = 99;

    /// Time that the vCPU must sleep now; zero means that it may run. `pages` is the number of pages that it has
    /// dirtied since its start. Call [`ThrottleClock::woke`] after the sleep.
    pub fn sleep_due(&mut self, now: Duration, pages: u64, limits: ThrottleLimits) -> Duration {
        let ran = now.saturating_sub(self.awake_since);
        let counted = ran.min(Self::SLICE * 2);
        let percent = u32::from(limits.percent.min(Self::PERCENT_MAX));
        let throttled = if ran < Self::SLICE { Duration::ZERO } else { counted * percent / (100 - percent) };
        throttled.max(self.limited(now, counted, pages, limits.dirty_bytes_per_second))
    }

    /// Whether [`ThrottleClock::sleep_due`] would return more than zero, so that the vCPU must leave the guest.
    pub fn is_due(&self, now: Duration, pages: u64, limits: ThrottleLimits) -> bool {
        let mut copy = *self;
        !copy.sleep_due(now, pages, limits).is_zero()
    }

    /// Restarts the accounting: pages that were dirtied before `now` cost no time.
    pub fn settle(&mut self, now: Duration, pages: u64) {
        (self.pages, self.paid_until) = (pages, now);
    }

    /// Records that the vCPU has slept, for any time, and runs again.
    pub fn woke(&mut self, now: Duration) {
        self.awake_since = now;
    }

    fn limited(&mut self, now: Duration, ran: Duration, pages: u64, limit: Option<u64>) -> Duration {
        let Some(limit) = limit else {
            self.settle(now, pages);
            return Duration::ZERO;
        };
        let new = pages.saturating_sub(self.pages);
        self.pages = pages;
        let cost = u128::from(new) * u128::from(PAGE_BYTES) * 1_000_000_000 / u128::from(limit.max(1));
        let cost = Duration::from_nanos(cost.min(u128::from(u64::MAX / 2)) as u64);
        // The part of a debt that exceeds the longest sleep is dropped.
        let most = ran.max(LEAST_SLEEP) * u32::from(Self::PERCENT_MAX);
        let paid_until = self.paid_until.max(now.saturating_sub(CREDIT)).saturating_add(cost);
        self.paid_until = paid_until.min(now + most);
        let debt = self.paid_until.saturating_sub(now);
        if debt < LEAST_SLEEP { Duration::ZERO } else { debt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs a vCPU for `steps` slices of a millisecond, in each of which it dirties `pages`. Returns the share of the
    /// time that it slept, and its dirty rate in bytes per second.
    fn run(limits: ThrottleLimits, steps: u32, pages: u64) -> (f64, f64) {
        let (mut throttle, mut now, mut slept) = (ThrottleClock::default(), Duration::ZERO, Duration::ZERO);
        let mut dirtied = 0;
        throttle.woke(now);
        for _ in 0..steps {
            now += MS;
            dirtied += pages;
            let sleep = throttle.sleep_due(now, dirtied, limits);
            if !sleep.is_zero() {
                now += sleep;
                slept += sleep;
                throttle.woke(now);
            }
        }
        (slept.as_secs_f64() / now.as_secs_f64(), (dirtied * 4096) as f64 / now.as_secs_f64())
    }

    #[test]
    fn sleep_of_a_throttled_vcpu_is_its_share() {
        for percent in [1, 20, 50, 90, 99] {
            let limits = ThrottleLimits { percent, dirty_bytes_per_second: None };

            let (share, _) = run(limits, 10_000, 3);

            assert!((share - f64::from(percent) / 100.0).abs() < 0.002, "{percent} %: {share}");
        }
        assert_eq!(run(ThrottleLimits::default(), 1000, 1000).0, 0.0);
        assert!(run(ThrottleLimits { percent: 255, ..ThrottleLimits::default() }, 1000, 0).0 < 0.995);
    }

    #[test]
    fn dirty_rate_of_a_limited_vcpu_is_the_limit() {
        for (limit, pages) in [(1 << 20, 1), (1 << 20, 10), (64 << 20, 1000), (100 << 20, 100)] {
            let limits = ThrottleLimits { percent: 0, dirty_bytes_per_second: Some(limit) };

            let (_, rate) = run(limits, 20_000, pages);

            assert!((rate / limit as f64 - 1.0).abs() < 0.02, "{limit}: {rate}");
        }
    }

    #[test]
    fn vcpu_below_its_limit_never_sleeps() {
        let limits = ThrottleLimits { percent: 0, dirty_bytes_per_second: Some(10 << 20) };
        assert_eq!(run(limits, 10_000, 2).0, 0.0);
    }

    #[test]
    fn limit_that_cannot_be_reached_leaves_a_hundredth_of_the_time() {
        let limits = ThrottleLimits { percent: 0, dirty_bytes_per_second: Some(1) };

        let (share, _) = run(limits, 1000, 100_000);

        assert!(share > 0.985 && share < 0.995, "{share}");
    }

    #[test]
    fn sleep_after_a_long_absence_is_short_all_the_same() {
        let mut throttle = ThrottleClock::default();
        let limits = ThrottleLimits { percent: 99, dirty_bytes_per_second: Some(1) };

        let sleep = throttle.sleep_due(Duration::from_secs(3600), u64::MAX, limits);

        assert!(sleep > Duration::from_secs(1) && sleep <= Duration::from_secs(2), "{sleep:?}");
    }

    #[test]
    fn is_due_says_what_sleep_due_would_and_changes_nothing() {
        let mut throttle = ThrottleClock::default();
        let limits = ThrottleLimits { percent: 50, dirty_bytes_per_second: None };

        assert!(!throttle.is_due(9 * MS, 0, limits) && throttle.is_due(10 * MS, 0, limits));
        assert_eq!(throttle.sleep_due(10 * MS, 0, limits), 10 * MS);
        throttle.woke(20 * MS);
        assert!(!throttle.is_due(25 * MS, 0, limits));
        assert!(!throttle.is_due(3600 * MS, u64::MAX, ThrottleLimits::default()));
    }
}
