//! Tests the policy in seeded worlds, and tests that the same worlds find the bugs of modified policies.

mod planted;
mod world;

use planted::{BUGS, Planted};
use world::{Broken, World};

use std::time::Duration;

use super::{
    Backlog, Begun, Counts, Input, Output, Policy, RoundProgress, Settings, Snapshot, StreamsRemaining,
    SyncResult, TRIED_PAGES,
};
use crate::lane_times::LaneTimes;

const RUNS: u64 = 100_000;

/// The first seed whose world the policy breaks, with the broken property.
fn first_broken<D: world::Decides>(
    seeds: std::ops::Range<u64>,
    make: impl Fn(super::Begun, super::Snapshot) -> D,
) -> Option<(u64, Broken)> {
    seeds.into_iter().find_map(|seed| Some((seed, World::new(seed).run(&make).err()?)))
}

#[test]
fn policy_breaks_nothing_in_a_hundred_thousand_worlds() {
    let broken = first_broken(0..RUNS, Policy::new);

    assert_eq!(broken, None, "the seed, and what broke: {:?}", broken.map(|(seed, _)| World::new(seed)));
}

#[test]
fn every_planted_bug_is_found() {
    for bug in BUGS {
        let found = first_broken(0..RUNS / 10, |begun, snapshot| Planted::new(bug, begun, snapshot));

        assert!(found.is_some(), "{bug:?} breaks nothing");
    }
}

/// A guest that writes 1000 pages per second, before the connection is lost and while it is lost.
#[test]
fn dirty_rate_after_a_lost_connection_is_over_the_time_since_the_last_sync() {
    let at = |seconds: u64| Snapshot { now: Duration::from_secs(seconds), ..Snapshot::default() };
    let begun = Begun {
        settings: Settings::default(),
        channels: 1,
        round_trip: Duration::ZERO,
        fixed_downtime: Duration::ZERO,
    };
    let synced = |dirtied_pages| SyncResult {
        took: Duration::ZERO,
        dirtied_pages,
        next_pages: dirtied_pages,
        backlog: Backlog { unsent_bytes: 0, streams: None, guest_runs: true },
    };
    let mut policy = Policy::new(begun, at(0));
    policy.handle(Input::Synced(synced(2000), at(2)));
    assert_eq!(policy.dirty_pages_per_second(), 1000);

    // The connection is lost at 3 s and replaced at 9 s.
    policy.handle(Input::Began(begun, at(9)));
    assert_eq!(policy.dirty_pages_per_second(), 0, "not measured yet");
    policy.handle(Input::Synced(synced(8000), at(10)));

    assert_eq!(policy.dirty_pages_per_second(), 1000);
}

/// An engine with one lane, and a guest that writes nothing. Only a device's state is left, which no lane can carry
/// while the guest runs.
struct Idle {
    policy: Policy,
    now: Duration,
    counts: Counts,
    /// Bytes per second of the network.
    bandwidth: f64,
    /// The network is measured at these times.
    tries: Vec<Duration>,
}

impl Idle {
    /// The first round has `pages` pages.
    fn begin(settings: Settings, pages: u64, bandwidth: f64) -> Self {
        let (round_trip, fixed_downtime) = (Duration::ZERO, Duration::ZERO);
        let begun = Begun { settings, channels: 1, round_trip, fixed_downtime };
        let policy = Policy::new(begun, Snapshot::default());
        let mut this =
            Self { policy, now: Duration::ZERO, counts: Counts::default(), bandwidth, tries: Vec::new() };
        this.send(pages);
        this
    }

    fn send(&mut self, pages: u64) {
        let bytes = pages * 4096;
        let took = Duration::from_secs_f64(bytes as f64 / self.bandwidth);
        self.now += took;
        self.counts.normal_pages += pages;
        self.counts.multifd_bytes += bytes;
        self.counts.times = self.counts.times + LaneTimes { moving: took, ..LaneTimes::default() };
    }

    fn snapshot(&self) -> Snapshot {
        let round = RoundProgress { pages: 0, remaining: 0, is_rearmed: true, is_searched: true };
        Snapshot { now: self.now, late: None, counts: self.counts, round }
    }

    /// Performs the policy's outputs until `until`. True: the guest is to be stopped.
    fn run(&mut self, until: Duration, streams: StreamsRemaining) -> bool {
        while self.now < until {
            self.now = self.policy.wake_at().max(self.now + Duration::from_millis(1));
            let mut outputs = self.policy.handle(Input::Observed(self.snapshot()));
            while !outputs.is_empty() {
                let mut next = Vec::new();
                for output in outputs {
                    match output {
                        Output::Sync => {
                            let backlog =
                                Backlog { unsent_bytes: 0, streams: Some(streams), guest_runs: true };
                            let took = Duration::from_micros(10);
                            let synced = SyncResult { took, dirtied_pages: 0, next_pages: 0, backlog };
                            next.extend(self.policy.handle(Input::Synced(synced, self.snapshot())));
                        }
                        Output::Publish { tries_network: true } => {
                            self.tries.push(self.now);
                            self.send(TRIED_PAGES);
                        }
                        Output::RunDry { .. } => {
                            next.extend(self.policy.handle(Input::Flushed(self.snapshot())));
                        }
                        Output::RequestSwitchover => return true,
                        _ => {}
                    }
                }
                outputs = next;
            }
        }
        false
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn state(bytes: u64, slowest: Duration) -> StreamsRemaining {
    StreamsRemaining { bytes, slowest, moves_in_downtime: true }
}

#[test]
fn device_that_waits_for_a_network_of_a_slow_moment_is_moved_when_the_network_is_fast_again() {
    // 20 MB take 20 s at 1 MB/s, and 200 ms at 100 MB/s. The limit is 300 ms.
    let streams = state(20_000_000, Duration::ZERO);
    let mut idle = Idle::begin(Settings::default(), 2000, 1e6);
    assert!(!idle.run(20 * SECOND, streams), "the network is slow");
    assert!(idle.policy.expected_downtime() > 10 * SECOND);

    idle.bandwidth = 1e8;
    let since = idle.now;

    assert!(idle.run(since + 20 * SECOND, streams), "{:?}", idle.policy.estimate());
}

#[test]
fn network_is_measured_again_at_intervals_that_leave_half_of_it_free() {
    for (bandwidth, interval) in [(1e8, SECOND), (1e6, 4 * SECOND)] {
        let mut idle = Idle::begin(Settings::default(), 2000, bandwidth);
        let begin = idle.now;

        assert!(!idle.run(begin + 60 * SECOND, state(1 << 30, Duration::ZERO)));

        assert!(idle.tries.len() >= 5, "{:?}", idle.tries);
        for pair in idle.tries.windows(2) {
            assert!(pair[1] - pair[0] >= interval, "{:?}", idle.tries);
        }
    }
}

#[test]
fn network_is_not_measured_again_where_it_does_not_decide() {
    let stated = Settings { avail_switchover_bandwidth_bytes: 1 << 20, ..Settings::default() };
    for (settings, streams) in
        [(Settings::default(), state(1 << 20, 9 * SECOND)), (stated, state(1 << 30, Duration::ZERO))]
    {
        let mut idle = Idle::begin(settings, 2000, 1e8);

        assert!(!idle.run(idle.now + 20 * SECOND, streams));

        assert_eq!(idle.tries, [], "{settings:?}");
    }
}
