//! Decides when a protection's checkpoints hang: the sides are in contact, but no further checkpoint becomes held.

use std::time::Duration;

/// Checkpoints hang after this number of intervals without a held checkpoint.
const INTERVALS: u32 = 4;
/// The shortest such time, because a busy host delays checkpoints now and then.
const LEAST: Duration = Duration::from_secs(2);

/// Whether checkpoints hang.
///
/// `age` is the time since the last one became held, `interval` the expected time between two.
#[must_use]
pub fn checkpoints_hang(age: Duration, interval: Duration) -> bool {
    age > LEAST.max(interval.saturating_mul(INTERVALS))
}

/// Typical interval after one more measured interval. A longer interval counts immediately; a shorter one is averaged
/// in.
pub(super) fn typical_interval(before: Option<Duration>, interval: Duration) -> Duration {
    match before {
        Some(before) if interval < before => (before * 7 + interval) / 8,
        _ => interval,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_hang_after_a_few_of_their_own_intervals() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        assert!(!checkpoints_hang(ms(1900), ms(10)), "a moment of a busy host");
        assert!(checkpoints_hang(ms(2100), ms(50)));
        assert!(!checkpoints_hang(s(39), s(10)));
        assert!(checkpoints_hang(s(41), s(10)));
        assert!(!checkpoints_hang(s(1 << 40), Duration::MAX));
    }

    #[test]
    fn interval_that_was_long_once_is_forgotten_slowly() {
        let ms = Duration::from_millis;
        let mut typical = typical_interval(None, ms(50));
        typical = typical_interval(Some(typical), ms(800));
        assert_eq!(typical, ms(800));
        for _ in 0..30 {
            typical = typical_interval(Some(typical), ms(50));
        }
        assert!(typical < ms(70), "{typical:?}");
    }
}
