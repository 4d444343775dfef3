//! When the next checkpoint is due. Pure: no clock, no threads.

use std::time::{Duration, Instant};

/// In mode `load` no pause makes the interval longer: the standby would fall behind, and output wait, for minutes.
const LONGEST_BY_LOAD: Duration = Duration::from_secs(10);
/// More checkpoints are never on their way at once.
pub const MOST_IN_FLIGHT: u8 = 4;
/// Between two looks whether a checkpoint is due.
const LONGEST_LOOK: Duration = Duration::from_millis(20);
const SHORTEST_LOOK: Duration = Duration::from_micros(500);

/// When checkpoints are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CheckpointMode {
    /// At a fixed interval, `x-checkpoint-delay`.
    #[default]
    Interval,
    /// When output has waited so long (`x-sterna-output-delay`). While the guest says nothing, the interval is `x-checkpoint-delay`.
    Output(Duration),
    /// So far apart that the guest stands for no more than so many percent of the time (`x-sterna-checkpoint-overhead`), but no farther than
    /// 10 s, and never closer than `x-checkpoint-delay`.
    Load(u8),
}

/// How checkpoints are taken. May change at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// From the beginning of a checkpoint to that of the next.
    pub delay: Duration,
    pub mode: CheckpointMode,
    /// So many checkpoints, 1 to [`MOST_IN_FLIGHT`], may be taken and not be held yet.
    pub in_flight: u8,
}

/// What is known when it is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// When the last checkpoint began.
    pub began: Instant,
    /// What the pauses take; none: there was none yet.
    pub pause: Option<Duration>,
    /// Since when output waits for a checkpoint that was not taken yet.
    pub waits_since: Option<Instant>,
}

impl Pace {
    /// From the beginning of a checkpoint to that of the next, unless output waits.
    pub(crate) fn interval(&self, pause: Option<Duration>) -> Duration {
        match (self.mode, pause) {
            (CheckpointMode::Load(percent), Some(pause)) => {
                self.delay.max((pause * 100 / u32::from(percent.max(1))).min(LONGEST_BY_LOAD))
            }
            _ => self.delay,
        }
    }

    /// Between two looks whether one is due: output comes without a nudge.
    pub(crate) fn look(&self) -> Duration {
        match self.mode {
            CheckpointMode::Output(longest) => (longest / 8).clamp(SHORTEST_LOOK, LONGEST_LOOK),
            _ => LONGEST_LOOK,
        }
    }

    /// When the next one is due.
    pub(crate) fn due(&self, seen: Seen) -> Instant {
        let by_interval = seen.began + self.interval(seen.pause);
        match (self.mode, seen.waits_since) {
            (CheckpointMode::Output(longest), Some(since)) => by_interval.min(since + longest),
            _ => by_interval,
        }
    }
}

/// When a checkpoint counts as begun that was due at `due` and begins at `now`: the next interval is reckoned from there. A beginning that is
/// a little late (a timer, a wake-up, a standby's answer) does not put the next one off, so that the rate is the one that was asked for. One that
/// is later than half an interval does: what is missed is not made up for.
pub(crate) fn counts_from(due: Instant, now: Instant, interval: Duration) -> Instant {
    if due <= now && now - due <= interval / 2 { due } else { now }
}

/// What pauses take: the last ones count most, and one that is longer counts at once.
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
        // A share of nothing would be never.
        assert_eq!(Pace { mode: CheckpointMode::Load(0), ..pace }.interval(Some(MS)), 100 * MS);
    }

    #[test]
    fn checkpoint_that_begins_late_does_not_put_the_next_one_off() {
        let pace = Pace { delay: 10 * MS, mode: CheckpointMode::Interval };
        let start = Instant::now();
        let mut began = start;
        for index in 1..=100 {
            let due = pace.due(seen(began));
            began = counts_from(due, due + MS, 10 * MS);
            assert_eq!(began, start + index * 10 * MS);
        }
        // Much too late: counted from there.
        let due = pace.due(seen(began));
        assert_eq!(counts_from(due, due + 6 * MS, 10 * MS), due + 6 * MS);
        // Asked for before it was due.
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
