//! Histogram of durations: memory is bounded, however many events are counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::latencies::{Latencies, POWERS};

/// Binary logarithm of the number of buckets per power of two. A bucket's bounds differ by an eighth at most.
const PARTS_BITS: u32 = 3;
const PARTS: usize = 1 << PARTS_BITS;
const BUCKETS: usize = (POWERS - PARTS_BITS as usize + 1) * PARTS;

/// Counts events from any thread, without a lock.
#[derive(Debug)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
    longest_nanos: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = std::array::from_fn(|_| AtomicU64::new(0));
        Self { buckets, nanos: AtomicU64::new(0), longest_nanos: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Counts one event of this duration.
    pub(crate) fn add(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(micros)].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.longest_nanos.fetch_max(nanos, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Latencies {
        let counts = self.buckets.each_ref().map(|count| count.load(Ordering::Relaxed));
        let count: u64 = counts.iter().sum();
        let longest = Duration::from_nanos(self.longest_nanos.load(Ordering::Relaxed));
        let bound = |index| upper_bound(index).unwrap_or(longest);
        // The upper bound of the bucket that contains this share of the events.
        let share = |permille: u64| {
            let rank = (count * permille).div_ceil(1000);
            let mut before = 0;
            let reached = counts.iter().position(|count| {
                before += count;
                before >= rank && before > 0
            });
            reached.map_or(Duration::ZERO, |index| bound(index).min(longest))
        };
        Latencies {
            count,
            average: Duration::from_nanos(
                self.nanos.load(Ordering::Relaxed).checked_div(count).unwrap_or_default(),
            ),
            p50: share(500),
            p99: share(990),
            longest,
            buckets: (0..BUCKETS)
                .filter(|index| counts[*index] > 0)
                .map(|index| (counts[index], bound(index)))
                .collect(),
        }
    }

    /// Number of events per power of two: from 2^N to 2^(N+1) microseconds.
    pub(crate) fn by_powers(&self) -> Vec<u64> {
        let mut powers = vec![0; POWERS];
        for (index, count) in self.buckets.iter().enumerate() {
            powers[lower_micros(index).max(1).ilog2() as usize] += count.load(Ordering::Relaxed);
        }
        powers
    }
}

fn bucket(micros: u64) -> usize {
    let micros = micros.min((1 << POWERS) - 1);
    if micros < PARTS as u64 {
        return micros as usize;
    }
    let shift = micros.ilog2() - PARTS_BITS;
    // Selects the bucket: the highest bit selects the power of two, and the next bits the part.
    shift as usize * PARTS + (micros >> shift) as usize
}

/// Lower bound of bucket `index`, in microseconds. `index` may be one after the last bucket.
fn lower_micros(index: usize) -> u64 {
    if index < PARTS {
        return index as u64;
    }
    let shift = index / PARTS - 1;
    ((PARTS + index % PARTS) as u64) << shift
}

/// Upper bound of bucket `index`; `None` for the last bucket, which has no bound.
fn upper_bound(index: usize) -> Option<Duration> {
    (index + 1 < BUCKETS).then(|| Duration::from_micros(lower_micros(index + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_within_its_bucket_and_bounds_differ_by_an_eighth() {
        let times = (0..40_000).chain((15..POWERS).flat_map(|power| {
            let power = 1u64 << power;
            [power - 1, power, power + power / 3]
        }));
        for micros in times {
            let index = bucket(micros);
            let (low, high) = (lower_micros(index), lower_micros(index + 1));
            assert!(low <= micros && micros < high, "{micros} in {index}: {low} to {high}");
            assert!(high - low <= (low / 8).max(1), "{micros} in {index}: {low} to {high}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn shares_are_upper_bounds_and_no_more_than_the_longest() {
        let times = Histogram::default();
        assert_eq!(times.snapshot(), Latencies::default());
        (0..98).for_each(|_| times.add(Duration::from_micros(100)));
        (0..2).for_each(|_| times.add(Duration::from_millis(5)));

        let got = times.snapshot();

        assert_eq!((got.count, got.longest), (100, Duration::from_millis(5)));
        assert_eq!(got.p50, Duration::from_micros(104));
        assert_eq!(got.p99, Duration::from_millis(5), "not the bound of 5.12 ms");
        assert_eq!(got.average, Duration::from_micros(198));
        assert_eq!(got.buckets, [(98, Duration::from_micros(104)), (2, Duration::from_micros(5120))]);
        let powers = times.by_powers();
        assert_eq!((powers[6], powers[12], powers.iter().sum::<u64>()), (98, 2, 100));
    }

    #[test]
    fn times_without_end_are_counted() {
        let times = Histogram::default();
        times.add(Duration::MAX);
        times.add(Duration::ZERO);

        assert_eq!((times.snapshot().count, times.by_powers()[0], times.by_powers()[31]), (2, 1, 1));
        assert!(times.snapshot().p99 <= times.snapshot().longest);
    }
}
