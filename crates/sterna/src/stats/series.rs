//! Counts events over time: memory is bounded, however long the series is.

use std::time::Duration;

use super::fault_series::FaultSeries;

/// Maximum number of parts.
const PARTS: usize = 64;
/// Initial duration of a part, in nanoseconds. When time passes the last part, two parts are merged into one.
const FIRST_WIDTH: u64 = 10_000_000;

/// Counts events by the time at which they happen.
#[derive(Debug)]
pub(crate) struct Series {
    width_nanos: u64,
    counts: [u64; PARTS],
}

impl Default for Series {
    fn default() -> Self {
        Self { width_nanos: FIRST_WIDTH, counts: [0; PARTS] }
    }
}

impl Series {
    /// Counts `count` events at time `at`, which is relative to the series' begin.
    pub(crate) fn add(&mut self, at: Duration, count: u64) {
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        while nanos / self.width_nanos >= PARTS as u64 {
            for part in 0..PARTS {
                let pair = self.counts.get(part * 2..part * 2 + 2).map_or(0, |pair| pair.iter().sum());
                self.counts[part] = pair;
            }
            self.width_nanos *= 2;
        }
        self.counts[(nanos / self.width_nanos) as usize] += count;
    }

    /// Returns the series; `began` is the time at which it began.
    pub(crate) fn snapshot(&self, began: Duration) -> FaultSeries {
        let used = self.counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        FaultSeries {
            began,
            part: Duration::from_nanos(self.width_nanos),
            counts: self.counts[..used].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_longer_and_nothing_is_lost() {
        let mut series = Series::default();
        let ms = Duration::from_millis;
        series.add(ms(0), 1);
        series.add(ms(15), 2);
        series.add(ms(639), 4);
        let fine = series.snapshot(ms(5));
        assert_eq!((fine.began, fine.part, fine.counts.len()), (ms(5), ms(10), 64));
        assert_eq!((fine.counts[0], fine.counts[1], fine.counts[63]), (1, 2, 4));

        series.add(ms(640), 8);
        let twice = series.snapshot(ms(5));
        assert_eq!((twice.part, twice.counts.len()), (ms(20), 33));
        assert_eq!((twice.counts[0], twice.counts[31], twice.counts[32]), (3, 4, 8));

        series.add(Duration::from_secs(3600), 16);
        let long = series.snapshot(ms(5));
        assert!(long.counts.len() <= PARTS && long.part * 64 > Duration::from_secs(3600));
        assert_eq!(long.counts[0], 15);
        assert_eq!(long.counts.iter().sum::<u64>(), 31);
    }

    #[test]
    fn no_time_is_too_long() {
        let mut series = Series::default();
        assert!(series.snapshot(Duration::ZERO).counts.is_empty());
        series.add(Duration::ZERO, 1);
        series.add(Duration::MAX, 1);
        assert_eq!(series.snapshot(Duration::ZERO).counts.iter().sum::<u64>(), 2);
    }
}
