//! A sample of the migrations over RDMA; `cargo xtask soak` plays 500.
#![allow(clippy::print_stdout, reason = "a randomised test says its seed")]

use sterna_soak::rdma;

#[test]
fn migrations_over_rdma_disturbed_anywhere_leave_one_guest_and_nothing_registered() {
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(14);
    println!("STERNA_SEED={seed}");

    let failures: Vec<String> = (0..30).filter_map(|number| rdma::one(seed, number).err()).collect();

    assert!(failures.is_empty(), "{failures:#?}");
}
