//! Helpers for tests of several crates: seeds of random tests, the messages of a handover, time
//! limits that allow for a busy machine, whether a socket listens, and the log.
//!
//! A failed test is repeated with the seed that it printed.
#![forbid(unsafe_code)]

mod core_time;
pub mod handover;
mod listening;
mod log;
mod small_disk;

pub use core_time::{CoreTime, stretched};
pub use listening::is_listening;
pub use log::log_from_env;
pub use small_disk::SmallDisk;

/// The seed of `test`: `STERNA_SEED` if set, otherwise random. Printed in both cases.
///
/// # Panics
/// `STERNA_SEED` is set and is not a number.
#[allow(clippy::print_stderr, reason = "whoever reads of a failure needs the seed")]
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("STERNA_SEED") {
        Ok(text) => text.parse().expect("STERNA_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{test}: STERNA_SEED={seed}");
    seed
}

/// How many rounds a test runs: `STERNA_ROUNDS` if set, otherwise `usual`.
///
/// # Panics
/// `STERNA_ROUNDS` is set and is not a number.
pub fn rounds(usual: u32) -> u32 {
    std::env::var("STERNA_ROUNDS").map_or(usual, |text| text.parse().expect("STERNA_ROUNDS is a number"))
}

/// A random generator with the [`seed`] of `test`.
pub fn random(test: &str) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed(test))
}
