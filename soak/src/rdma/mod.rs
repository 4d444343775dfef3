//! Migrations over RDMA, on adapters inside this process. Most are disturbed: an operator gives one side up,
//! a request or a registration fails, a connection ends, a link or an adapter fails.
//!
//! The judge checks each case:
//!
//! - Exactly one side runs the guest, and its memory is one consistent cut.
//! - No queue pair, registration, listener or pinned byte is left.
//! - No memory was discarded below a registration.
//! - The next migration works.

mod case;
mod disturbance;

use case::Case;

/// Plays one case, and returns a description of it.
///
/// # Errors
/// The violated property, and the command that plays the case again.
pub fn one(seed: u64, number: u64) -> Result<String, String> {
    let case = Case::new(seed, number);
    let what = format!("{case:?}");
    match case.play() {
        Ok(how) => Ok(format!("{what}: {how}")),
        Err(why) => Err(format!("soak --rdma-case {number} --seed {seed}: {why}; it was {what}")),
    }
}
