//! Measures how fast a guest really writes, from samples of its own counters.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The rate covers this time, or slightly more.
const WINDOW: Duration = Duration::from_secs(2);
/// The shortest time from which a rate is computed.
const LEAST: Duration = Duration::from_millis(100);

/// Counts of the last [`WINDOW`].
#[derive(Debug, Default)]
pub struct Meter(Mutex<VecDeque<(Instant, u64)>>);

impl Meter {
    /// Adds a sample: at `now`, the guest had written `pages` pages in total.
    pub fn note(&self, now: Instant, pages: u64) {
        let mut counts = self.0.lock();
        if counts.back().is_some_and(|(_, before)| *before > pages) {
            // A smaller count means that another guest has arrived.
            counts.clear();
        }
        counts.push_back((now, pages));
        while counts.len() > 2 && now.duration_since(counts[1].0) >= WINDOW {
            counts.pop_front();
        }
    }

    /// Pages per second over the window; none until two samples are far enough apart.
    pub fn pages_per_second(&self) -> Option<f64> {
        let counts = self.0.lock();
        let ((first, before), (last, now)) = (counts.front()?, counts.back()?);
        let time = last.duration_since(*first);
        (time >= LEAST).then(|| (now - before) as f64 / time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTH: Duration = Duration::from_millis(100);

    #[test]
    fn rate_is_that_of_the_last_two_seconds() {
        let (meter, begin) = (Meter::default(), Instant::now());
        assert_eq!(meter.pages_per_second(), None);
        for tenth in 0..100u32 {
            // 1000 pages a second for five seconds, then none.
            meter.note(begin + TENTH * tenth, u64::from(tenth.min(50)) * 100);
            match tenth {
                0 => assert_eq!(meter.pages_per_second(), None),
                1..=50 => assert!((meter.pages_per_second().unwrap() - 1000.0).abs() < 1e-6, "{tenth}"),
                60 => assert!((meter.pages_per_second().unwrap() - 500.0).abs() < 60.0),
                71.. => assert_eq!(meter.pages_per_second(), Some(0.0), "{tenth}"),
                _ => {}
            }
        }
    }

    #[test]
    fn rate_begins_anew_with_another_guest() {
        let (meter, begin) = (Meter::default(), Instant::now());
        meter.note(begin, 1000);
        meter.note(begin + TENTH, 2000);
        meter.note(begin + TENTH * 2, 0);
        assert_eq!(meter.pages_per_second(), None);
        meter.note(begin + TENTH * 3, 10);
        assert!((meter.pages_per_second().unwrap() - 100.0).abs() < 1e-6);
    }
}
