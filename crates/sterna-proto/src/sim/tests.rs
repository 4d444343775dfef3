//! The ordinary test run: 300,000 schedules without a violation, and every planted bug found.

use super::{Coverage, Kind, Place, Planted, campaign};
use crate::{destination, source};

const SCHEDULES: u64 = 300_000;
/// Limit of campaigns in which a planted bug must break an invariant.
const MOST_CAMPAIGNS: u64 = 64;

/// A decimal number from an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seed of this run: `STERNA_SEED`, or a random one.
fn seed() -> u64 {
    number("STERNA_SEED").unwrap_or_else(|| fastrand::u64(..) >> 1)
}

#[test]
#[allow(clippy::print_stdout)]
fn handover_under_random_faults_keeps_invariants() {
    let (seed, schedules) = (seed(), number("STERNA_SCHEDULES").unwrap_or(SCHEDULES));
    println!("STERNA_SEED={seed} STERNA_SCHEDULES={schedules}");
    let mut coverage = Coverage::default();
    let result = campaign(seed, schedules, None, &mut coverage);
    println!("{coverage}");
    if let Err(failure) = result {
        panic!("{failure}");
    }
    if schedules < SCHEDULES {
        return; // A replay says nothing about coverage.
    }
    let blind: Vec<_> = Coverage::places()
        .flat_map(|place| Kind::ALL.map(|kind| (place, kind)))
        .filter(|(place, kind)| coverage.blows(*place, *kind) < least(*place))
        .collect();
    assert!(blind.is_empty(), "hardly struck: {blind:?}\n{coverage}");
    assert!(coverage.known_double_runs > 0, "{coverage}");
    assert!(coverage.whole_without_end > 0, "{coverage}");
}

/// How often each kind of blow must strike a state in the ordinary run.
fn least(place: Place) -> u64 {
    match place {
        // No blow can strike in a final state.
        Place::Source(state) if state.is_final() => 0,
        Place::Destination(state) if state.is_final() => 0,
        _ => 50,
    }
}

#[test]
#[allow(clippy::print_stdout)]
fn simulator_with_planted_bug_finds_it() {
    let seed = seed();
    println!("STERNA_SEED={seed}");
    for bug in Planted::ALL {
        let mut coverage = Coverage::default();
        // Some bugs only prevent the end of a schedule, because a start waits for a page that never
        // arrives. That alone does not prove that the checks work.
        let failure = (0..MOST_CAMPAIGNS).find_map(|n| {
            let found =
                campaign(seed.wrapping_add(n * SCHEDULES), SCHEDULES, Some(bug), &mut coverage).err()?;
            found.violation.starts_with("invariant").then_some(found)
        });
        let failure = failure.unwrap_or_else(|| panic!("{bug:?} was not found"));
        let after = coverage.schedules;
        println!("{bug:?}: after {after} schedules: {}", failure.violation);
    }
}

#[test]
fn simulator_with_same_seed_repeats_itself() {
    let mut runs = [Coverage::default(), Coverage::default()];
    for coverage in &mut runs {
        assert!(campaign(7, 200, None, coverage).is_ok());
    }
    assert_eq!(runs[0].to_string(), runs[1].to_string());
}

#[test]
fn coverage_of_quiet_run_reaches_completion() {
    let quiet = (0..)
        .map(super::Schedule::from_seed)
        .find(|schedule| schedule.faults.is_empty() && schedule.pairing == super::Pairing::Sternas);
    let schedule = quiet.expect("one of many seeds");
    let mut coverage = Coverage::default();
    let (violation, _) = super::World::new(&schedule, &mut coverage, false).run();
    assert_eq!(violation, None);
    let completed = Place::Source(source::State::Completed);
    assert_eq!(coverage.visits(completed), 1);
    let taken = [destination::State::Running, destination::State::Paused];
    let taken = taken.map(|state| coverage.visits(Place::Destination(state)));
    assert_eq!(taken[0] + taken[1], 1);
}
