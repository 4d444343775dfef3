//! Protections whose primary is killed or frozen as a process.
//!
//! The primary is a process of its own ([`primary`]): it is killed with SIGKILL, or stopped with SIGSTOP and woken when its guest
//! runs elsewhere. The standby is in this process. Both ask an arbiter that is a directory. The observer knows what came
//! out of the primary's process through a pipe, and what the survivor says.
//!
//! Each is judged: the survivor goes on from a checkpoint that the primary has taken, whose memory, by a sum of all of
//! it, it has; what was heard is never ahead of that; the survivor's memory is one consistent cut, and it goes on; a
//! primary that wakes says nothing more and stops its guest.

mod account;
mod blow;
mod judge;
mod play;
pub mod primary;
mod process;
mod report;

use std::path::Path;

use blow::Kill;
pub use blow::Planted;
pub use report::{Report, many};

/// How often a case is played when the primary was alone before the blow fell, because the host gave it no time. Its lease is four
/// times as long each time.
const TRIES: u64 = 4;

/// What was played.
#[derive(Debug, Clone)]
pub struct Killed {
    /// What fell on it and when, for tables.
    pub what: String,
    /// From which checkpoint the survivor went on.
    pub checkpoint: u64,
    /// Plays that do not count: the primary was alone before.
    pub again: u64,
    /// Of a primary that woke: bytes that were leaving when it was frozen.
    pub late_bytes: Option<usize>,
}

enum Failure {
    /// The primary's lease ended before anything fell on it.
    AloneBefore,
    Wrong(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Wrong(why)
    }
}

/// Plays one case. `program`: this crate's binary, which plays the primary.
///
/// # Errors
/// What was wrong, and how to play it again.
pub fn one(program: &Path, seed: u64, number: u64, planted: Option<Planted>) -> Result<Killed, String> {
    for again in 0..TRIES {
        let kill = Kill::new(seed, number, again);
        match kill.play(program, (seed, number, again), planted) {
            Ok((checkpoint, late_bytes)) => {
                return Ok(Killed { what: kill.label(), checkpoint, again, late_bytes });
            }
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
