//! A sample of the disturbed protections; `cargo xtask soak --colo` plays more.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use sterna_soak::{colo, round_trips};

#[test]
fn protections_disturbed_anywhere_leave_one_whole_guest_and_an_observer_that_missed_nothing() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(15);
    println!("STERNA_SEED={seed}");
    // A first migration opens everything that a process opens once and keeps, before resources are counted.
    round_trips::run(1, 0, |_, _| {}).unwrap();

    let failures: Vec<String> = (0..24).filter_map(|number| colo::one(seed, number).err()).collect();

    assert!(failures.is_empty(), "{failures:#?}");

    // Descriptors and threads are counted per process, so this part is no test of its own.
    println!("{}", colo::long(seed, 2000).expect("nothing grows"));
}
