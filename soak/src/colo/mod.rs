//! Protections of guests that are disturbed. Connections are cut or silent, devices and the VMM fail, and
//! operators give orders. A standby is dropped, or the arbiter is unreachable.
//!
//! The judge checks each case:
//!
//! - The guest never runs on both sides at the same time. In the end, it runs on exactly one side.
//! - Its memory is one consistent cut.
//! - An observer's output is never ahead of the guest. It is complete when the outputs of both sides are put
//!   together.
//! - The side that has lost the guest knows it.
//! - No descriptor or thread is left.
//! - The guest can be migrated and protected again.

mod arbiter;
mod case;
mod judge;
pub mod kills;
mod long;
mod next;
mod play;
mod sampler;
mod sides;
mod trouble;
mod vm;
mod voice;
mod wire;

use std::time::Duration;

use crate::leaks::Belongings;
use case::Case;
pub use long::long;

/// Limit of every wait, also on a busy machine.
const LONGEST: Duration = Duration::from_secs(60);

/// A case that was played, and its end.
#[derive(Debug, Clone)]
pub struct Played {
    /// Name of the disturbance, for tables.
    pub trouble: String,
    /// Outcome at primary and standby, for tables.
    pub end: String,
    /// Full description of the case.
    pub what: String,
}

/// Plays one case. No other thread may open or close descriptors in this process meanwhile.
///
/// # Errors
/// The violated property, and the command that plays the case again.
pub fn one(seed: u64, number: u64) -> Result<Played, String> {
    let case = Case::new(seed, number);
    let (what, trouble) = (format!("{case:?}"), case.trouble.label());
    let before = Belongings::now();
    let ended = case.play().and_then(|end| before.wait_restored(LONGEST / 4).map(|()| end));
    match ended {
        Ok(end) => Ok(Played { trouble, end, what }),
        Err(why) => Err(format!("soak --colo-case {number} --seed {seed}: {why}; it was {what}")),
    }
}
