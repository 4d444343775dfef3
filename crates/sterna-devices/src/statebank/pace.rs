//! Lets bytes through at a rate.

use std::time::{Duration, Instant};

/// A rate that is kept to exactly: what takes a second at the rate takes a second, and time in which nothing was asked
/// for earns nothing. Only what a sleep overshot is made up for.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// When the last bytes were, or should have been, through.
    due: Option<Instant>,
    /// How much later the sleeper woke.
    overshot: Duration,
}

impl Pace {
    /// So many bytes per second; 0: without limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, due: None, overshot: Duration::ZERO }
    }

    /// `bytes` are asked for at `now`: until when to sleep, before they are given. Tell [`Pace::woke`] after that.
    pub fn ask(&mut self, bytes: usize, now: Instant) -> Option<Instant> {
        if self.bytes_per_second == 0 || bytes == 0 {
            return None;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let began = now.checked_sub(self.overshot).unwrap_or(now);
        let began = self.due.map_or(began, |due| due.max(began));
        let due = began + takes;
        (self.due, self.overshot) = (Some(due), Duration::ZERO);
        Some(due)
    }

    /// The sleep until `due` ended at `now`.
    pub fn woke(&mut self, due: Instant, now: Instant) {
        self.overshot = now.saturating_duration_since(due);
    }
}

/// Sleeps until then.
pub(super) fn sleep_until(due: Instant) {
    while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::sleep(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLION: u64 = 1_000_000;

    #[test]
    fn ask_of_a_stream_takes_its_time_in_all() {
        let start = Instant::now();
        let mut pace = Pace::new(MILLION);
        let mut now = start;
        for _ in 0..100 {
            let due = pace.ask(10_000, now).unwrap();
            // Each sleep ends 100 µs late.
            now = due + Duration::from_micros(100);
            pace.woke(due, now);
        }
        let took = now - start;
        let most = Duration::from_millis(1001);
        assert!(took >= Duration::from_secs(1) && took <= most, "{took:?}");
    }

    #[test]
    fn ask_after_a_rest_earns_nothing() {
        let start = Instant::now();
        let mut pace = Pace::new(MILLION);
        let due = pace.ask(1000, start).unwrap();
        pace.woke(due, due);
        let later = start + Duration::from_secs(5);
        assert_eq!(pace.ask(1_000_000, later), Some(later + Duration::from_secs(1)));
    }

    #[test]
    fn ask_without_a_limit_takes_no_time() {
        assert_eq!(Pace::new(0).ask(1 << 30, Instant::now()), None);
    }
}
