//! A sample of the primaries that are killed as processes; `cargo xtask soak --kills` plays more.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use std::path::Path;

use sterna_soak::colo::kills::{self, Planted};

const PROGRAM: &str = env!("CARGO_BIN_EXE_soak");

#[test]
fn guest_whose_primary_is_killed_goes_on_from_a_held_checkpoint_and_runs_once() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(16);
    println!("STERNA_SEED={seed}");

    let played: Vec<_> = (0..5).map(|number| kills::one(Path::new(PROGRAM), seed, number, None)).collect();

    assert!(played.iter().all(Result::is_ok), "{played:#?}");
}

#[test]
fn primary_that_lets_output_go_before_its_checkpoint_is_held_is_found() {
    found(Planted::ReleasesOnTaken, "was heard");
}

#[test]
fn primary_that_wakes_and_runs_its_guest_is_found() {
    found(Planted::BelievesItWon, "woke");
}

/// One of the first cases finds it.
fn found(planted: Planted, how: &str) {
    let play = |number| kills::one(Path::new(PROGRAM), 16, number, Some(planted)).err();
    let found = (0..30).filter_map(play).find(|why| why.contains(how));
    println!("{found:?}");
    assert!(found.is_some(), "{planted:?} was not found");
}
