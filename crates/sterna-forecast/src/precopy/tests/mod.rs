//! Tests the policy in seeded worlds, and tests that the same worlds find the bugs of modified policies.

mod planted;
mod world;

use planted::{BUGS, Planted};
use world::{Broken, World};

use std::time::Duration;

use super::{Backlog, Begun, Input, Policy, Settings, Snapshot, SyncResult};

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
