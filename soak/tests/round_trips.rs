//! A sample of 200 consecutive migrations of a guest that writes at full speed. `soak --round-trips 200` runs
//! all of them.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

#[test]
fn guest_at_full_speed_is_whole_after_each_of_many_migrations() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(5);
    println!("STERNA_SEED={seed}");

    let figures = sterna_soak::round_trips::run(10, seed, |_, _| {}).unwrap();

    assert_eq!(figures.migrations, 10);
    // The number of rounds depends on the machine. The guest's writes during the migration do not.
    assert!(figures.rounds > figures.migrations && figures.steps > 0, "{figures:?}");
}
