//! What reports derive from the engine's statistics.

use std::time::Duration;

use sterna::{LaneTimes, Round, Statistics};

use crate::units::PAGE_BYTES;

/// Time in which bytes moved, over all rounds; the rounds' length where that was not measured.
pub fn moving_time(statistics: &Statistics) -> Duration {
    let moving: Duration = statistics.rounds.iter().map(|round| round.lanes.moving).sum();
    if moving.is_zero() { statistics.rounds.iter().map(|round| round.took).sum() } else { moving }
}

/// Bytes of all rounds over the time in which bytes moved; nothing if none did, or if postcopy began before the first round was
/// through: what went out until then may be a few packets, and the rest of the guest is in no round.
pub fn moving_bandwidth(statistics: &Statistics) -> Option<f64> {
    if statistics.postcopy.is_some() && statistics.rounds.len() <= 1 {
        return None;
    }
    let bytes: u64 = statistics.rounds.iter().map(|round| round.bytes).sum();
    let time = moving_time(statistics);
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64())
}

/// Time that syncs took, over all rounds.
pub fn sync_time(statistics: &Statistics) -> Duration {
    statistics.rounds.iter().map(|round| round.sync).sum()
}

/// What lanes did over all rounds while the guest ran, per lane on average.
pub fn lane_times(statistics: &Statistics) -> LaneTimes {
    let running = statistics.rounds.iter().filter(|round| !round.stopped);
    running.fold(LaneTimes::default(), |sum, round| sum + round.lanes)
}

/// Pages that became dirty during the round at `index`: what was found at its end, or what the next one set out with,
/// whichever is known.
pub fn dirtied_in(statistics: &Statistics, index: usize) -> u64 {
    let pages = |index: usize, pages: fn(&Round) -> u64| statistics.rounds.get(index).map_or(0, pages);
    pages(index, |round| round.dirtied_pages).max(pages(index + 1, |round| round.pages))
}

/// The highest dirty rate that was seen, over a round or a sample, bytes per second.
pub fn most_dirty_rate(statistics: &Statistics) -> f64 {
    let sampled = statistics.samples.iter().map(|sample| sample.dirty_pages_per_second).max().unwrap_or(0);
    let rounds = statistics.rounds.iter().enumerate().filter(|(_, round)| !round.took.is_zero());
    let most = rounds
        .map(|(at, round)| dirtied_in(statistics, at) as f64 / round.took.as_secs_f64())
        .fold(0.0, f64::max);
    most.max(sampled.max(statistics.dirty_pages_per_second) as f64) * PAGE_BYTES as f64
}

#[cfg(test)]
mod tests {
    use sterna::stats::PostcopyStatistics;

    use super::*;

    #[test]
    fn moving_bandwidth_leaves_out_time_in_which_nothing_moved() {
        let lanes = |moving| LaneTimes { moving: Duration::from_secs(moving), ..LaneTimes::default() };
        let took = Duration::from_secs(10);
        let round = |moving, bytes| Round { took, lanes: lanes(moving), bytes, ..Round::default() };
        let statistics = Statistics { rounds: vec![round(1, 100), round(3, 300)], ..Statistics::default() };

        assert_eq!(moving_bandwidth(&statistics), Some(100.0));
        assert_eq!(moving_bandwidth(&Statistics::default()), None);
    }

    #[test]
    fn moving_bandwidth_is_unknown_where_postcopy_began_in_the_first_round() {
        let lanes = LaneTimes { moving: Duration::from_micros(3), ..LaneTimes::default() };
        let round = Round { took: Duration::from_secs(1), lanes, bytes: 300, ..Round::default() };
        let switched = |rounds: Vec<Round>| Statistics {
            rounds,
            postcopy: Some(PostcopyStatistics::default()),
            ..Statistics::default()
        };

        assert_eq!(moving_bandwidth(&switched(vec![round])), None);
        assert_eq!(moving_bandwidth(&switched(vec![])), None);
        let known = moving_bandwidth(&switched(vec![round, round])).expect("a round was through");
        assert!((known - 1e8).abs() < 1.0, "{known}");
        assert!(moving_bandwidth(&Statistics { postcopy: None, ..switched(vec![round]) }).is_some());
    }

    #[test]
    fn dirtied_in_a_round_is_at_least_what_the_next_one_sends() {
        let took = Duration::from_secs(2);
        let round = |pages, dirtied_pages| Round { took, pages, dirtied_pages, ..Round::default() };
        let statistics = Statistics { rounds: vec![round(50, 0), round(30, 40)], ..Statistics::default() };

        assert_eq!([0, 1, 2].map(|index| dirtied_in(&statistics, index)), [30, 40, 0]);
        assert_eq!(most_dirty_rate(&statistics), 20.0 * 4096.0);
    }
}
