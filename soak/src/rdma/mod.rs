//! Migrations over RDMA, on adapters inside this process, of which most are disturbed: an operator gives one side up, a request or a
//! registration fails, a connection ends, a link or an adapter is gone.
//!
//! Each is judged: exactly one side runs the guest, its memory is one consistent cut, no queue pair, registration,
//! listener or pinned byte is left, no memory was discarded below a registration, and the next migration works.

mod case;
mod disturbance;

use case::Case;

/// Plays one case. Gives what it was.
///
/// # Errors
/// What was wrong, and how to play it again.
pub fn one(seed: u64, number: u64) -> Result<String, String> {
    let case = Case::new(seed, number);
    let what = format!("{case:?}");
    match case.play() {
        Ok(how) => Ok(format!("{what}: {how}")),
        Err(why) => Err(format!("soak --rdma-case {number} --seed {seed}: {why}; it was {what}")),
    }
}
