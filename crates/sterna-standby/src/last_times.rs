//! Keeps the durations of the last events of a kind, and computes percentiles.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of durations that are kept.
const KEPT: usize = 1024;

/// Durations of the last 1024 events.
#[derive(Debug, Clone, Default)]
pub struct LastTimes(VecDeque<Duration>);

impl LastTimes {
    /// Adds a duration. The oldest is dropped if there are already 1024.
    pub fn note(&mut self, time: Duration) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(time);
    }

    /// Drops all durations.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Percentiles: for each value of `per_mille`, the duration that so many of 1000 events do not exceed. Zero
    /// before the first event.
    pub fn at_most<const N: usize>(&self, per_mille: [usize; N]) -> [Duration; N] {
        let mut times: Vec<Duration> = self.0.iter().copied().collect();
        times.sort_unstable();
        per_mille.map(|per_mille| {
            let index = (times.len().saturating_sub(1) * per_mille.min(1000)).div_ceil(1000);
            times.get(index).copied().unwrap_or_default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_times() {
        let mut times = LastTimes::default();
        assert_eq!(times.at_most([500]), [Duration::ZERO]);
        (0..5000).for_each(|_| times.note(Duration::from_secs(9)));
        (0..KEPT as u64).rev().for_each(|ms| times.note(Duration::from_millis(ms)));
        let ms = times.at_most([0, 500, 990, 1000, 2000]).map(|time| time.as_millis());
        assert_eq!(ms, [0, 512, 1013, 1023, 1023]);
        times.clear();
        assert_eq!(times.at_most([1000]), [Duration::ZERO]);
    }
}
