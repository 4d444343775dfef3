//! Protections whose primary is killed or frozen as a process.
//!
//! The primary is a process of its own ([`primary`]). It is killed with SIGKILL, or stopped with SIGSTOP and
//! woken when its guest runs at the standby. The standby is in this process. Both ask an arbiter that is a
//! directory. The observer reads the output of the primary's process through a pipe and as packets, and the
//! output of the survivor.
//!
//! The judge checks each case:
//!
//! - The survivor resumes from a checkpoint that the primary has taken. A sum of all memory proves it.
//! - Heard output is never ahead of the survivor.
//! - The survivor's memory is one consistent cut, and the survivor keeps running.
//! - A primary that wakes writes nothing more and stops its guest.

mod account;
mod blow;
mod judge;
mod packets;
mod play;
pub mod primary;
mod process;
mod report;

use std::path::Path;

use blow::Kill;
pub use blow::Planted;
use judge::Verdict;
pub use report::{Report, many};

/// Limit of plays of a case. It is played again if the primary's lease ended before the blow, because the
/// host did not schedule it. The lease is four times as long each time.
const TRIES: u64 = 4;

/// Result of a case without violations.
#[derive(Debug, Clone)]
pub struct Killed {
    /// Blow and time, for tables.
    pub what: String,
    /// Number of the checkpoint from which the survivor resumed.
    pub checkpoint: u64,
    /// Number of plays that do not count, because the primary's lease ended before the blow.
    pub again: u64,
    /// Number of the primary's packets that were heard.
    pub packets: usize,
    /// For a primary that woke: bytes that were in transit when it was frozen.
    pub late_bytes: Option<usize>,
}

impl Killed {
    fn new(what: String, again: u64, verdict: Verdict) -> Self {
        let Verdict { checkpoint, packets, late_bytes } = verdict;
        Self { what, checkpoint, again, packets, late_bytes }
    }
}

enum Failure {
    /// The primary's lease ended before the blow.
    AloneBefore,
    Wrong(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Wrong(why)
    }
}

/// Plays one case. `program` is this crate's binary, which runs the primary.
///
/// # Errors
/// The violated property, and the command that plays the case again.
pub fn one(program: &Path, seed: u64, number: u64, planted: Option<Planted>) -> Result<Killed, String> {
    for again in 0..TRIES {
        let kill = Kill::new(seed, number, again);
        match kill.play(program, (seed, number, again), planted) {
            Ok(verdict) => return Ok(Killed::new(kill.label(), again, verdict)),
            Err(Failure::AloneBefore) => tracing::warn!(number, "the primary was alone before the blow"),
            Err(Failure::Wrong(why)) => {
                return Err(format!("soak --kills-case {number} --seed {seed}: {why}; it was {kill:?}"));
            }
        }
    }
    Err(format!(
        "soak --kills-case {number} --seed {seed}: the primary was alone before the blow, {TRIES} times"
    ))
}
