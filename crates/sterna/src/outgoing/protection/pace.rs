//! The time of the next checkpoint, as pure functions without clock and threads.

use std::time::{Duration, Instant};

/// The longest interval in mode `load`.
///
/// With a longer one, the standby would lag and output would wait for minutes.
const LONGEST_BY_LOAD: Duration = Duration::from_secs(10);
/// The largest number of checkpoints that may be in flight at the same time.
pub const MOST_IN_FLIGHT: u8 = 4;
/// The longest interval at which the control thread checks whether a checkpoint is due.
const LONGEST_LOOK: Duration = Duration::from_millis(20);
const SHORTEST_LOOK: Duration = Duration::from_micros(500);

/// Which condition starts a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CheckpointMode {
    /// Checkpoints start at a fixed interval, `x-checkpoint-delay`.
    #[default]
    Interval,
    /// A checkpoint starts when output has waited for this time (`x-sterna-output-delay`).
    ///
    /// While the guest sends no output, the interval is `x-checkpoint-delay`.
    Output(Duration),
    /// The guest is paused for at most this percentage of the time (`x-sterna-checkpoint-overhead`).
    ///
    /// The interval is at least `x-checkpoint-delay`, and at most 10 s.
    Load(u8),
}

/// How often checkpoints are taken. The settings may change at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub struct Pace {
    /// The time from the beginning of a checkpoint to the beginning of the next.
    pub delay: Duration,
    pub mode: CheckpointMode,
    /// How many checkpoints, 1 to [`MOST_IN_FLIGHT`], may be taken and not be held yet.
    pub in_flight: u8,
}

/// Facts that decide when the next checkpoint is due.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// When the last checkpoint began.
    pub began: Instant,
    /// The typical duration of a pause; `None` before the first one.
    pub pause: Option<Duration>,
    /// The time since which output waits for a checkpoint that is not taken yet.
    pub waits_since: Option<Instant>,
}

impl Pace {
    /// The time between the beginnings of two checkpoints, unless output waits.
    pub fn interval(&self, pause: Option<Duration>) -> Duration {
        match (self.mode, pause) {
            (CheckpointMode::Load(percent), Some(pause)) => {
                self.delay.max((pause * 100 / u32::from(percent.max(1))).min(LONGEST_BY_LOAD))
            }
            _ => self.delay,
        }
    }

    /// The interval at which to check whether a checkpoint is due.
    ///
    /// The check is needed because output arrives without a wake-up of this thread.
    pub(crate) fn look(&self) -> Duration {
        match self.mode {
            CheckpointMode::Output(longest) => (longest / 8).clamp(SHORTEST_LOOK, LONGEST_LOOK),
            _ => LONGEST_LOOK,
        }
    }

    /// The time at which the next checkpoint is due.
    pub(crate) fn due(&self, seen: Seen) -> Instant {
        let by_interval = seen.began + self.interval(seen.pause);
        match (self.mode, seen.waits_since) {
            (CheckpointMode::Output(longest), Some(since)) => by_interval.min(since + longest),
            _ => by_interval,
        }
    }
}

/// The time from which the next interval counts.
///
/// A checkpoint was due at `due` and begins at `now`.
///
/// A beginning may be a little late because of a timer, a wake-up or a standby's answer. It does not delay the
/// next one, so that the rate is the requested one. After a delay of more than half an interval, the interval
/// counts from `now`: missed checkpoints are not made up for.
pub(crate) fn counts_from(due: Instant, now: Instant, interval: Duration) -> Instant {
    if due <= now && now - due <= interval / 2 { due } else { now }
}

/// The typical duration of a pause, with more weight on recent ones.
///
/// A longer pause counts in full immediately.
pub(crate) fn typical(before: Option<Duration>, pause: Duration) -> Duration {
    match before {
        Some(before) if pause < before => (before * 3 + pause) / 4,
        _ => pause,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn seen(began: Instant) -> Seen {
        Seen { began, pause: None, waits_since: None }
    }

    #[test]
    fn fixed_interval_counts_from_beginning_to_beginning() {
        let began = Instant::now();
        let pace = Pace { delay: 50 * MS, mode: CheckpointMode::Interval, in_flight: 1 };
        let seen = Seen { pause: Some(40 * MS), waits_since: Some(began), ..seen(began) };
        assert_eq!(pace.due(seen), began + 50 * MS);
    }

    #[test]
    fn output_brings_the_checkpoint_forward_and_never_puts_it_off() {
        let began = Instant::now();
        let pace = Pace { delay: 1000 * MS, mode: CheckpointMode::Output(10 * MS), in_flight: 1 };
        assert_eq!(pace.due(seen(began)), began + 1000 * MS);
        let said = |after| Seen { waits_since: Some(began + after), ..seen(began) };
        assert_eq!(pace.due(said(3 * MS)), began + 13 * MS);
        assert_eq!(pace.due(said(999 * MS)), began + 1000 * MS);
    }

    #[test]
    fn guest_loses_no_more_than_its_share() {
        let pace = Pace { delay: 10 * MS, mode: CheckpointMode::Load(5), in_flight: 1 };
        assert_eq!(pace.interval(None), 10 * MS);
        assert_eq!(pace.interval(Some(4 * MS)), 80 * MS);
        assert_eq!(pace.interval(Some(MS / 10)), 10 * MS);
        assert_eq!(
            pace.interval(Some(1000 * MS)),
            LONGEST_BY_LOAD,
            "one pause does not put the next off for 20 s"
        );
        let slower = Pace { delay: 60_000 * MS, ..pace };
        assert_eq!(slower.interval(Some(1000 * MS)), slower.delay);
        // A share of zero percent would mean no checkpoint at all.
        assert_eq!(Pace { mode: CheckpointMode::Load(0), ..pace }.interval(Some(MS)), 100 * MS);
    }

    #[test]
    fn checkpoint_that_begins_late_does_not_put_the_next_one_off() {
        let pace = Pace { delay: 10 * MS, mode: CheckpointMode::Interval, in_flight: 1 };
        let start = Instant::now();
        let mut began = start;
        for index in 1..=100 {
            let due = pace.due(seen(began));
            began = counts_from(due, due + MS, 10 * MS);
            assert_eq!(began, start + index * 10 * MS);
        }
        // The checkpoint is much too late: the interval counts from its beginning.
        let due = pace.due(seen(began));
        assert_eq!(counts_from(due, due + 6 * MS, 10 * MS), due + 6 * MS);
        // The checkpoint was requested before it was due.
        assert_eq!(counts_from(due, due - MS, 10 * MS), due - MS);
    }

    #[test]
    fn long_pause_counts_at_once_and_is_forgotten_slowly() {
        let mut pause = typical(None, MS);
        pause = typical(Some(pause), 9 * MS);
        assert_eq!(pause, 9 * MS);
        pause = typical(Some(pause), MS);
        assert_eq!(pause, 7 * MS);
        for _ in 0..20 {
            pause = typical(Some(pause), MS);
        }
        assert!(pause < 2 * MS, "{pause:?}");
    }
}
