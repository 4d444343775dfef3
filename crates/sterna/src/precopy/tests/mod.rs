//! The policy in seeded worlds, and policies with planted bugs, which the same worlds must find.

mod planted;
mod world;

use planted::{BUGS, Planted};
use world::{Broken, World};

use super::Policy;

const RUNS: u64 = 100_000;

/// What breaks in the worlds of so many seeds, the first of them.
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
