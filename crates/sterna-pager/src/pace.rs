//! The speed of the background fill.
//!
//! The adaptive rule. The fill costs a guest at most the processor time that both want. A guest that has as many busy
//! virtual processors as the host has processors loses the fill's whole time, so the fill takes a tenth of one processor
//! ([`LEAST_SHARE`]): of one virtual processor that shares its processor with the fill, nine tenths are left. While the host has
//! an idle processor, no guest loses that time, and only memory bandwidth is shared: the share doubles at each look, up to
//! [`MOST_SHARE`]. As soon as no processor is idle, the share is the least again.

use std::time::{Duration, Instant};

use crate::options::FillRate;

/// The share of one processor that is always used.
pub(crate) const LEAST_SHARE: f64 = 0.1;
/// The share of one processor that is used while another one is idle.
pub(crate) const MOST_SHARE: f64 = 0.5;
/// Interval between two looks at the host's processors.
const LOOK: Duration = Duration::from_millis(100);
/// Idle processors above which the share grows, and below which it is the least.
const IDLE: f64 = 0.7;
const BUSY: f64 = 0.4;
/// Shorter pauses are added up, because a sleep is not exact.
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);
/// A pause that could not be taken, because placing took long, is not made up for beyond this time.
const MOST_CREDIT: Duration = Duration::from_millis(20);

/// Decides how long the fill pauses after a piece of work.
#[derive(Debug)]
pub(crate) struct Pace {
    rate: FillRate,
    share: f64,
    /// Pause that is owed, in seconds. Negative: a pause was too long.
    owed: f64,
}

impl Pace {
    pub(crate) fn new(rate: FillRate) -> Self {
        Self { rate, share: LEAST_SHARE, owed: 0.0 }
    }

    /// The pause after `bytes` bytes were placed in `worked`. Zero: continue.
    pub(crate) fn pause(&mut self, worked: Duration, bytes: u64) -> Duration {
        let worked = worked.as_secs_f64();
        self.owed += match self.rate {
            FillRate::Adaptive => worked * (1.0 - self.share) / self.share,
            FillRate::BytesPerSecond(rate) => bytes as f64 / rate.max(1) as f64 - worked,
            FillRate::Max | FillRate::Off => 0.0,
        };
        self.owed = self.owed.max(-MOST_CREDIT.as_secs_f64());
        if self.owed >= SHORTEST_PAUSE.as_secs_f64() {
            Duration::from_secs_f64(self.owed)
        } else {
            Duration::ZERO
        }
    }

    /// Notes a pause that was taken.
    pub(crate) fn paused(&mut self, time: Duration) {
        self.owed -= time.as_secs_f64();
    }

    /// Notes the number of idle processors since the last look.
    pub(crate) fn looked(&mut self, idle: f64) {
        if idle < BUSY {
            self.share = LEAST_SHARE;
        } else if idle > IDLE {
            self.share = (self.share * 2.0).min(MOST_SHARE);
        }
    }
}

/// Looks at the host's processors from time to time.
#[derive(Debug)]
pub(crate) struct Processors {
    looked_at: Instant,
    idle: Option<u64>,
}

impl Processors {
    /// Only the adaptive rate reads the host's figures: a sandbox may forbid it.
    pub(crate) fn new(rate: FillRate) -> Self {
        let idle = if rate == FillRate::Adaptive { idle_ticks() } else { None };
        Self { looked_at: Instant::now(), idle }
    }

    /// The number of processors that were idle since the last look, if it is time to look again.
    pub(crate) fn look(&mut self) -> Option<f64> {
        let elapsed = self.looked_at.elapsed();
        if elapsed < LOOK {
            return None;
        }
        let (before, now) = (self.idle, idle_ticks());
        (self.looked_at, self.idle) = (Instant::now(), now);
        // Without the figures, the host counts as busy.
        let ticks = match (before, now) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => 0,
        };
        Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64 / elapsed.as_secs_f64())
    }
}

/// Time that the host's processors were idle or waited for a disk, in clock ticks.
fn idle_ticks() -> Option<u64> {
    sum_of_idle(&std::fs::read_to_string("/proc/stat").ok()?)
}

fn sum_of_idle(stat: &str) -> Option<u64> {
    let mut fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().skip(3);
    let idle: u64 = fields.next()?.parse().ok()?;
    let waits: u64 = fields.next()?.parse().ok()?;
    Some(idle + waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn busy_host_leaves_the_fill_a_tenth_of_a_processor() {
        let mut pace = Pace::new(FillRate::Adaptive);
        pace.looked(2.0);
        pace.looked(0.0);

        assert_eq!(pace.pause(MS, 1 << 16).as_micros(), 9_000);
        pace.paused(9 * MS);
        assert_eq!(pace.pause(MS / 100, 1 << 16), Duration::ZERO, "a short pause is owed");
    }

    #[test]
    fn idle_processor_lets_the_share_grow_to_its_limit() {
        let mut pace = Pace::new(FillRate::Adaptive);
        for _ in 0..10 {
            pace.looked(1.0);
        }

        assert_eq!(pace.pause(MS, 1 << 16), MS);
    }

    #[test]
    fn rate_counts_bytes_and_the_time_of_the_work() {
        let mut pace = Pace::new(FillRate::BytesPerSecond(1 << 20));

        let pause = pace.pause(100 * MS, 1 << 20);
        assert!((pause.as_secs_f64() - 0.9).abs() < 1e-6, "{pause:?}");
        pace.paused(pause);
        assert_eq!(pace.pause(Duration::from_secs(5), 1 << 20), Duration::ZERO);
        let later = pace.pause(Duration::ZERO, 1 << 20).as_secs_f64();
        assert!((later - 0.98).abs() < 1e-6, "at most 20 ms are made up for: {later}");
    }

    #[test]
    fn full_speed_has_no_pause() {
        assert_eq!(Pace::new(FillRate::Max).pause(Duration::from_secs(1), 1), Duration::ZERO);
    }

    #[test]
    fn idle_time_is_read_from_the_first_line() {
        let stat = "cpu  10 20 30 400 5 0 0 0 0 0\ncpu0 1 2 3 4 5 0 0 0 0 0\n";

        assert_eq!(sum_of_idle(stat), Some(405));
        assert_eq!(sum_of_idle("intr 5"), None);
    }
}
