//! A sample of the 200 migrations in a row under full tide (`soak --round-trips 200`).
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

#[test]
fn guest_at_full_speed_is_whole_after_each_of_many_migrations() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(5);
    println!("STERNA_SEED={seed}");

    let figures = sterna_soak::round_trips::run(10, seed, |_, _| {}).unwrap();

    assert_eq!(figures.migrations, 10);
    // How many rounds a migration takes hangs on the machine; that its guest wrote beside it does not.
    assert!(figures.rounds > figures.migrations && figures.steps > 0, "{figures:?}");
}
