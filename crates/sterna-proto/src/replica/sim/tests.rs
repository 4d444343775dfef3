//! The ordinary test run: 300,000 schedules without a violation, and every planted bug found.

use super::{Coverage, Place, Planted, campaign};
use crate::replica::{primary, standby};

const SCHEDULES: u64 = 300_000;

/// A decimal number from an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

#[test]
#[allow(clippy::print_stdout)]
fn protection_under_random_faults_keeps_invariants() {
    let (seed, schedules) =
        (number("STERNA_SEED").unwrap_or(1), number("STERNA_SCHEDULES").unwrap_or(SCHEDULES));
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
    let places = primary::State::ALL.map(Place::Primary).into_iter();
    let places = places.chain(standby::State::ALL.map(Place::Standby));
    let blind: Vec<_> = places.filter(|place| coverage.blows(*place) < 50).collect();
    assert!(blind.is_empty(), "hardly struck: {blind:?}\n{coverage}");
    assert!(coverage.quiet_handovers > 100, "{coverage}");
    assert!(coverage.quiet_refusals > 100, "{coverage}");
}

#[test]
#[allow(clippy::print_stdout)]
fn simulator_with_planted_bug_finds_it() {
    let seed = number("STERNA_SEED").unwrap_or(1);
    println!("STERNA_SEED={seed}");
    for bug in Planted::ALL {
        let mut coverage = Coverage::default();
        let found = campaign(seed, SCHEDULES, Some(bug), &mut coverage);
        let failure = found.err().unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: after {} schedules: {}", coverage.schedules, failure.violation);
        assert!(
            failure.violation.starts_with("invariant"),
            "{bug:?} was found for a wrong reason: {failure}"
        );
    }
}

#[test]
fn simulator_with_same_seed_repeats_itself() {
    let mut runs = [Coverage::default(), Coverage::default()];
    for coverage in &mut runs {
        campaign(7, 200, None, coverage).expect("no violation");
    }
    assert_eq!(runs[0].to_string(), runs[1].to_string());
}
