//! Runs the handover simulator for a chosen number of schedules:
//!
//! ```text
//! STERNA_SEED=1 STERNA_SCHEDULES=10000000 \
//!     cargo run --release -p sterna-proto --features sim --example handover-sim
//! ```
//!
//! Prints the histogram of states and faults, and the schedules per second. After a violation it
//! prints the shrunk schedule with its trace and exits with status 1.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::time::Instant;
use sterna_proto::sim::{Coverage, campaign};

fn main() -> ExitCode {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("STERNA_SEED").unwrap_or(1);
    let schedules = number("STERNA_SCHEDULES").unwrap_or(1_000_000);
    println!("STERNA_SEED={seed} STERNA_SCHEDULES={schedules}");
    let mut coverage = Coverage::default();
    let start = Instant::now();
    let result = campaign(seed, schedules, None, &mut coverage);
    let seconds = start.elapsed().as_secs_f64();
    println!("{coverage}");
    println!("{:.0} schedules a second", coverage.schedules as f64 / seconds);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}
