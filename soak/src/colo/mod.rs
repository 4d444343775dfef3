//! Protections of guests that are disturbed: connections are cut or silent, devices and the VMM fail, operators give orders, a standby is
//! dropped, the arbiter is out of reach.
//!
//! Each is judged: never two sides run the guest at once, and in the end exactly one does; its memory is one consistent cut; what an
//! observer heard is never ahead of it, and lacks nothing when both sides' outputs are put together; the side that has lost knows
//! it; no descriptor or thread is left; and the guest can be migrated and protected again.

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

/// Nothing may take longer, on a machine as busy as it likes.
const LONGEST: Duration = Duration::from_secs(60);

/// What was played, and how it ended.
#[derive(Debug, Clone)]
pub struct Played {
    /// What went wrong, for tables.
    pub trouble: String,
    /// How it ended at primary and standby, for tables.
    pub end: String,
    /// All of it.
    pub what: String,
}

/// Plays one case. Nothing else may open or close descriptors in this process meanwhile.
///
/// # Errors
/// What was wrong, and how to play it again.
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
