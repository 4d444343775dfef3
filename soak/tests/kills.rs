//! A sample of primaries that are killed as processes; `cargo xtask soak --kills` plays more.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use std::path::Path;

use sterna_soak::colo::kills::{self, Planted};

const PROGRAM: &str = env!("CARGO_BIN_EXE_soak");

/// Seed of the cases with planted faults.
const SEED: u64 = 16;

#[test]
fn guest_whose_primary_is_killed_goes_on_from_a_held_checkpoint_and_runs_once() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(16);
    println!("STERNA_SEED={seed}");

    let played: Vec<_> = (0..10).map(|number| kills::one(Path::new(PROGRAM), seed, number, None)).collect();

    assert!(played.iter().all(Result::is_ok), "{played:#?}");
    assert!(played.iter().flatten().any(|killed| killed.packets > 0), "nobody heard a packet");
}

#[test]
fn primary_that_lets_output_go_before_its_checkpoint_is_held_is_found() {
    // In these cases the primary is killed in a pause or before a resume. Output that it releases in the
    // pause belongs to a checkpoint that is not held.
    found(Planted::ReleasesOnTaken, &[0, 1, 3, 12], "the primary was heard ahead");
    found(Planted::SendsOnTaken, &[0, 1, 3, 12, 23, 24], "packet");
}

#[test]
fn primary_that_wakes_and_runs_its_guest_is_found() {
    found(Planted::BelievesItWon, &[2, 4, 7, 13], "its guest runs at the standby");
}

/// At least one of these cases finds the fault. A case finds nothing if the guest sends no output between two
/// checkpoints.
fn found(planted: Planted, numbers: &[u64], how: &str) {
    let play = |number: &u64| kills::one(Path::new(PROGRAM), SEED, *number, Some(planted)).err();
    let failures: Vec<_> = numbers.iter().filter_map(play).collect();
    println!("{failures:#?}");
    assert!(failures.iter().any(|why| why.contains(how)), "{planted:?} was not found: {failures:#?}");
}
