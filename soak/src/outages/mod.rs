//! Migrations over networks that fail: in postcopy, and in precopy with `x-sterna-reconnect-window`.
//!
//! Connections are cut at a byte position, in a state, or at a message of the handover, before or after its
//! receiver acts on it. One connection or all are cut, for a moment or for longer than the window, and again
//! during a reconnection. Operators give orders. One side is killed. If a side is to be killed, both sides
//! live in processes of their own. The reason: a guest that waits for pages of a dead source ends only with
//! its process.
//!
//! The judge checks each case:
//!
//! - The guest never runs on two sides. In the end it runs on exactly one, or it waits for pages that cannot
//!   arrive because its source was killed.
//! - Every page of the guest is right.
//! - A migration that neither side has given up has arrived.
//! - The side that has lost the guest knows it.
//! - The guest can be migrated again.
//! - No descriptor, thread or mapping is left.

mod cable;
mod case;
mod certificates;
mod judge;
mod killed;
mod messages;
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

/// Limit of every wait, in time of a quiet machine.
const LONGEST: Duration = Duration::from_secs(60);

/// A case that was played, and its end.
#[derive(Debug, Clone)]
pub struct Played {
    /// Name of the disturbance, for tables.
    pub trouble: &'static str,
    /// End of the case, for tables.
    pub end: String,
    /// States of source and destination at each disturbance.
    pub struck: Vec<String>,
    /// Bytes of pages that were sent again, if a connection was replaced in precopy.
    pub resent_bytes: Option<u64>,
    /// Full description of the case.
    pub what: String,
}

/// Plays one case. `program` runs sides that are killed. No other thread may open or close descriptors in
/// this process meanwhile.
///
/// # Errors
/// The violated property, and the command that plays the case again.
pub fn one(kind: Kind, seed: u64, number: u64, program: &Path) -> Result<Played, String> {
    one_with(kind, seed, number, program, None)
}

/// Plays one case with a planted fault, which the judge must find.
///
/// # Errors
/// The same as for [`one`].
pub fn one_with(
    kind: Kind,
    seed: u64,
    number: u64,
    program: &Path,
    plant: Option<Plant>,
) -> Result<Played, String> {
    let case = Case::new(kind, seed, number, plant);
    let (what, trouble) = (format!("{case:?}"), case.label());
    // Certificates are made once for all cases, so they are made before resources are counted.
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
