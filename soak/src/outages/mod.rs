//! Migrations over networks that fail: in postcopy, and in precopy with `x-sterna-reconnect-window`.
//!
//! Connections are cut at a byte or in a state, one of them or all, for a moment or for longer than anybody waits, and again while they are
//! being made anew; operators give orders; one side is killed. A side that is to be killed lives in a process of its own, and then the other
//! does, too: a guest that waits for pages that nobody has any more ends with its process.
//!
//! Each case is judged: the guest never runs on two sides, and in the end on exactly one, or it waits where its pages never come because its
//! source was killed; every page of it is right; what nobody gave up has arrived; the side that has lost it knows it; the guest can be
//! migrated again; no descriptor, thread or mapping is left.

mod cable;
mod case;
mod certificates;
mod judge;
mod killed;
mod plants;
mod play;
mod process;
mod report;
mod side;
mod trouble;

use std::path::Path;
use std::time::Duration;

use crate::leaks::Belongings;
use case::Case;
pub use case::Kind;
pub use plants::Plant;
pub use process::{ROLE, main};
pub use report::{Report, several};

/// Nothing may take longer, on a machine as busy as it likes.
const LONGEST: Duration = Duration::from_secs(60);

/// What was played, and how it ended.
#[derive(Debug, Clone)]
pub struct Played {
    /// What went wrong, for tables.
    pub trouble: &'static str,
    /// How it ended, for tables.
    pub end: String,
    /// In which states of the source and the destination something went wrong.
    pub struck: Vec<String>,
    /// Bytes of pages that were sent again, if a connection was made anew in precopy.
    pub resent_bytes: Option<u64>,
    /// All of it.
    pub what: String,
}

/// Plays one case; `program` plays sides that are killed. Nothing else may open or close descriptors in this process meanwhile.
///
/// # Errors
/// What was wrong, and how to play it again.
pub fn one(kind: Kind, seed: u64, number: u64, program: &Path) -> Result<Played, String> {
    one_with(kind, seed, number, program, None)
}

/// The same with something that is wrong in it, which must be found.
///
/// # Errors
/// As [`one`].
pub fn one_with(
    kind: Kind,
    seed: u64,
    number: u64,
    program: &Path,
    plant: Option<Plant>,
) -> Result<Played, String> {
    let case = Case::new(kind, seed, number, plant);
    let (what, trouble) = (format!("{case:?}"), case.label());
    // What is made once for all cases is made before anything is counted.
    certificates::directory()?;
    let before = Belongings::now();
    let ended = if case.kills() { killed::play(&case, program) } else { case.play() };
    let ended = ended.and_then(|end| before.wait_restored(LONGEST / 12).map(|()| end));
    match ended {
        Ok(end) => {
            let play::End { how, struck, resent_bytes } = end;
            Ok(Played { trouble, end: how, struck, resent_bytes, what })
        }
        Err(why) => {
            let option = kind.label();
            Err(format!("soak --{option}-case {number} --seed {seed}: {why}; it was {what}"))
        }
    }
}
