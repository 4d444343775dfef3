//! Values that reports compute from the engine's statistics.

use std::time::Duration;

use sterna::{LaneTimes, Round, Statistics};

use crate::units::PAGE_BYTES;

/// Over a shorter time, a dirty rate is not reliable: a sync itself takes part of the time.
const LEAST_TIME: Duration = Duration::from_millis(5);

/// Whether the engine measured the times of the round.
/// A QEMU's monitor reports no rounds. They are reconstructed from queries about 0.1 s apart, so their times
/// are too coarse to compute rates.
pub fn is_timed(round: &Round) -> bool {
    round.lanes != LaneTimes::default() || !round.dirtied_time.is_zero()
}

/// Time in which bytes moved, over all rounds; none if it was not measured.
pub fn moving_time(statistics: &Statistics) -> Option<Duration> {
    let moving: Duration = statistics.rounds.iter().map(|round| round.lanes.moving).sum();
    (!moving.is_zero()).then_some(moving)
}

/// Bytes of all rounds divided by the time in which bytes moved.
/// None if the time was not measured, or if postcopy began before the end of the first round.
/// The bytes sent until then may be a few packets, and no round contains the rest of the guest.
pub fn moving_bandwidth(statistics: &Statistics) -> Option<f64> {
    if statistics.postcopy.is_some() && statistics.rounds.len() <= 1 {
        return None;
    }
    let bytes: u64 = statistics.rounds.iter().map(|round| round.bytes).sum();
    let time = moving_time(statistics)?;
    (bytes > 0).then(|| bytes as f64 / time.as_secs_f64())
}

/// All bytes divided by the total time without the setup; none if that time is zero.
pub fn mean_throughput(statistics: &Statistics) -> Option<f64> {
    let time = statistics.total_time.saturating_sub(statistics.setup_time);
    (statistics.transferred_bytes > 0 && !time.is_zero())
        .then(|| statistics.transferred_bytes as f64 / time.as_secs_f64())
}

/// Duration of all syncs; none if no round's times were measured.
pub fn sync_time(statistics: &Statistics) -> Option<Duration> {
    let rounds = &statistics.rounds;
    rounds.iter().any(is_timed).then(|| rounds.iter().map(|round| round.sync).sum())
}

/// How lanes spent their time over all rounds while the guest ran.
pub fn lane_times(statistics: &Statistics) -> LaneTimes {
    let running = statistics.rounds.iter().filter(|round| !round.stopped);
    running.fold(LaneTimes::default(), |sum, round| sum + round.lanes)
}

/// Pages that became dirty during the round at `index`.
/// None if they were not measured: the round was not finished, or it is a QEMU's. A stopped guest writes
/// nothing.
pub fn dirtied_in(statistics: &Statistics, index: usize) -> Option<u64> {
    let round = statistics.rounds.get(index)?;
    if round.unfinished || !is_timed(round) {
        return None;
    }
    if round.stopped || !round.dirtied_time.is_zero() {
        return Some(round.dirtied_pages);
    }
    if round.sync.is_zero() {
        // There was no sync in this round.
        return None;
    }
    // A record of version 0.1 stores the result of a later sync in the next round. After a lost connection,
    // that round also contains other pages.
    let is_next = |next: &&Round| next.number == round.number + 1 && !is_after_loss(statistics, next);
    let next = statistics.rounds.get(index + 1).filter(is_next);
    Some(next.map_or(0, |next| next.pages).max(round.dirtied_pages))
}

fn is_after_loss(statistics: &Statistics, round: &Round) -> bool {
    let mut losses = statistics.reconnections.iter().map(|lost| lost.at + lost.took);
    losses.any(|end| end.abs_diff(round.began) < LEAST_TIME)
}

/// Dirty rate during the round at `index`, bytes per second; none if pages or time were not measured.
pub fn dirty_rate_in(statistics: &Statistics, index: usize) -> Option<f64> {
    let pages = dirtied_in(statistics, index)?;
    let round = &statistics.rounds[index];
    if round.stopped {
        return Some(0.0);
    }
    let time = if round.dirtied_time.is_zero() { round.took } else { round.dirtied_time };
    (time >= LEAST_TIME).then(|| pages as f64 * PAGE_BYTES as f64 / time.as_secs_f64())
}

/// The highest measured dirty rate, of a sample or over a round, bytes per second.
pub fn most_dirty_rate(statistics: &Statistics) -> Option<f64> {
    let samples = statistics.samples.iter().map(|sample| sample.dirty_pages_per_second);
    let pages = samples.chain([statistics.dirty_pages_per_second]).max().unwrap_or(0);
    // The rate is 0 before the first measurement.
    let measured = (pages > 0).then_some(pages as f64 * PAGE_BYTES as f64);
    let running = (0..statistics.rounds.len()).filter(|index| !statistics.rounds[*index].stopped);
    running.filter_map(|index| dirty_rate_in(statistics, index)).chain(measured).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use sterna::stats::{PostcopyStatistics, Reconnection};

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

    /// 4096 pages in 2 s are 8 MiB/s.
    fn writer() -> Round {
        Round {
            number: 1,
            took: Duration::from_millis(20),
            lanes: LaneTimes { moving: Duration::from_millis(1), ..LaneTimes::default() },
            dirtied_pages: 4096,
            dirtied_time: Duration::from_secs(2),
            ..Round::default()
        }
    }

    #[test]
    fn dirty_rate_is_that_of_the_time_between_two_syncs_however_short_the_round() {
        let statistics = Statistics { rounds: vec![writer()], ..Statistics::default() };

        assert_eq!(dirtied_in(&statistics, 0), Some(4096));
        assert_eq!(dirty_rate_in(&statistics, 0), Some(8.0 * 1024.0 * 1024.0));
        assert_eq!(most_dirty_rate(&statistics), Some(8.0 * 1024.0 * 1024.0));
    }

    /// Once a record reported 2.56 GiB/s for a guest that wrote 8 MB/s.
    /// A query had seen the round for only a few milliseconds.
    #[test]
    fn dirty_rate_is_not_known_where_the_time_was_not_measured() {
        let seen = Round { lanes: LaneTimes::default(), dirtied_time: Duration::ZERO, ..writer() };
        let sync = Duration::from_millis(3);
        let unfinished = Round { unfinished: true, sync, dirtied_time: Duration::ZERO, ..writer() };
        let instant = Round { dirtied_time: Duration::from_micros(40), ..writer() };
        let unsynced = Round { dirtied_pages: 0, dirtied_time: Duration::ZERO, ..writer() };
        for round in [seen, unfinished, instant, unsynced] {
            let statistics = Statistics { rounds: vec![round], ..Statistics::default() };
            assert_eq!(
                (dirty_rate_in(&statistics, 0), most_dirty_rate(&statistics)),
                (None, None),
                "{round:?}"
            );
        }
        assert_eq!(most_dirty_rate(&Statistics::default()), None);
        let samples = vec![sterna::Sample { dirty_pages_per_second: 2000, ..sterna::Sample::default() }];
        let of_qemu = Statistics { rounds: vec![seen], samples, ..Statistics::default() };
        assert_eq!(most_dirty_rate(&of_qemu), Some(2000.0 * 4096.0));
        assert_eq!((moving_bandwidth(&of_qemu), sync_time(&of_qemu)), (None, None));
    }

    #[test]
    fn dirtied_in_a_round_of_an_old_record_is_at_least_what_the_next_one_sends() {
        let round = |number, pages, dirtied_pages| Round {
            number,
            began: Duration::from_secs(2 * number),
            took: Duration::from_secs(2),
            pages,
            dirtied_pages,
            dirtied_time: Duration::ZERO,
            sync: Duration::from_millis(1),
            ..writer()
        };
        let rounds = vec![round(1, 50, 0), round(2, 30, 40)];
        let statistics = Statistics { rounds, ..Statistics::default() };

        assert_eq!([0, 1, 2].map(|index| dirtied_in(&statistics, index)), [Some(30), Some(40), None]);
        assert_eq!(most_dirty_rate(&statistics), Some(20.0 * 4096.0));

        // The second round contains the pages that the destination lacked after the loss, not the pages that
        // the guest wrote.
        let lost = Reconnection {
            at: Duration::from_secs(3),
            took: Duration::from_secs(1),
            ..Reconnection::default()
        };
        let statistics = Statistics { reconnections: vec![lost], ..statistics };
        assert_eq!(dirtied_in(&statistics, 0), Some(0));
    }

    #[test]
    fn dirty_rate_of_a_stopped_guest_is_zero() {
        let stopped = Round { stopped: true, dirtied_pages: 0, dirtied_time: Duration::ZERO, ..writer() };
        let statistics = Statistics { rounds: vec![stopped], ..Statistics::default() };

        assert_eq!(dirty_rate_in(&statistics, 0), Some(0.0));
    }

    #[test]
    fn mean_throughput_leaves_out_the_setup() {
        let statistics = Statistics {
            transferred_bytes: 3000,
            total_time: Duration::from_secs(4),
            setup_time: Duration::from_secs(1),
            ..Statistics::default()
        };

        assert_eq!(mean_throughput(&statistics), Some(1000.0));
        assert_eq!(mean_throughput(&Statistics::default()), None);
    }
}
