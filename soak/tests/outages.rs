//! A sample of the migrations whose connections break; `cargo xtask soak` plays more. This binary has one
//! test, because the test counts the resources of the process.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use std::path::Path;
use std::sync::atomic::AtomicBool;

use sterna_soak::outages::{Kind, Plant, one_with, several};
use sterna_soak::round_trips;

/// Planted faults, each with the kind of migration and a word of the judge's report.
const PLANTS: [(Plant, Kind, &str); 7] = [
    (Plant::StaleAfterReconnection, Kind::Resumed, "at the destination"),
    (Plant::UntoldZeros, Kind::Resumed, "expected zeros of step"),
    (Plant::RunsAgain, Kind::Postcopy, "starts the guest while the other side runs it"),
    (Plant::ChangedPages, Kind::Postcopy, "at the destination"),
    (Plant::NoWindow, Kind::Cuts, "it has not arrived"),
    (Plant::Descriptor, Kind::Resumed, "left behind"),
    (Plant::Mapping, Kind::Resumed, "left behind"),
];

#[test]
fn migrations_whose_connections_break_anywhere_leave_one_whole_guest_and_faults_are_found() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(17);
    println!("STERNA_SEED={seed}");
    let program = Path::new(env!("CARGO_BIN_EXE_soak"));
    // A first migration opens everything that a process opens once and keeps, before resources are counted.
    round_trips::run(1, 0, |_, _| {}).unwrap();

    let mut failures = Vec::new();
    for (kind, count) in [(Kind::Postcopy, 10), (Kind::Resumed, 6), (Kind::Cuts, 6), (Kind::Handover, 16)] {
        let never = AtomicBool::new(false);
        let tell = |_, played: &Result<_, String>| failures.extend(played.as_ref().err().cloned());
        println!("{}", several(kind, seed, 0..count, program, &never, tell));
    }
    assert!(failures.is_empty(), "{failures:#?}");

    // The planted faults follow the sample, because a case that fails leaves resources behind.
    for (plant, kind, word) in PLANTS {
        let why = one_with(kind, seed, 0, program, Some(plant)).expect_err("it is wrong");
        assert!(why.contains(word), "{plant:?}: {why}");
    }
}
