//! Proves that RAM is one consistent cut of a guest that follows the [`crate::model`].
//!
//! The guest must be paused. From each worker's counter, seed and history the checker computes every byte
//! of every page that the worker owns, and demands exactly these bytes. It reads RAM through
//! [`sterna_ram::RamBlock::read`]. It does not read pages that were never populated, so a sparse guest
//! stays sparse.
//!
//! Its rules:
//! - A page that a step wrote contains the words of the *last* step that wrote it. Its other words are its
//!   fill, or zeros if an earlier step zeroed the page.
//! - A page that the last step zeroed is zero. Other content belongs to an older step, which the verdict
//!   names.
//! - A page that no step wrote contains its fill.
//! - The page of a worker's next step may contain the first words of that step, followed by the older
//!   words. Any number of new words is permitted, unless the guest reports an exact number ([`InFlight`]).
//! - No worker has seen more steps of another worker than that worker has counted ([`Witness`]). So the
//!   memory of different workers is from one instant.
#![forbid(unsafe_code)]

mod diagnose;
mod pages;
mod verdict;

pub use verdict::{Damage, PagePlace, Verdict, Violation};

use sterna_ram::{GuestRam, RamError};

use crate::model::{Acts, Fill, History, Share, WordPlan};

/// The progress of a worker in the step after the last counted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlight {
    /// Any number of words may be written, because the guest was stopped between two arbitrary
    /// instructions.
    Unknown,
    /// As [`InFlight::Unknown`], but the last word may be half written.
    ///
    /// The guest writes 32 bits at a time, the low half first.
    UnknownHalves,
    /// Exactly this number of words. For a step that stores zeros, this is the number of zeroed words.
    Words(usize),
}

/// A worker's reading of another worker's counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// The other worker's index.
    pub worker: usize,
    /// The value of the other worker's counter that was read.
    pub steps: u64,
}

/// The state of a worker at the cut.
#[derive(Debug, Clone)]
pub struct WorkerCut {
    /// The pages that the worker owns.
    pub share: Share,
    /// The number of steps that the worker has counted.
    pub steps: u64,
    /// The progress of the next step.
    pub in_flight: InFlight,
    /// The worker's patterns over time.
    pub history: History,
    /// The seed of the worker's patterns.
    pub seed: u64,
    /// The worker's reading of another worker's counter.
    pub witness: Option<Witness>,
}

/// The state of a guest at the cut.
#[derive(Debug, Clone)]
pub struct Cut {
    /// The words of a page that a step writes.
    pub plan: WordPlan,
    /// The content of RAM at the start.
    pub fill: Fill,
    /// The choice of steps that zero pages.
    pub acts: Acts,
    /// The workers, in the order of their numbers.
    pub workers: Vec<WorkerCut>,
}

/// The reason why no verdict is possible.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The guest runs, so its memory changes during the check.
    #[error("the guest runs; stop it before checking")]
    Running,
    /// There is no guest yet.
    #[error("no guest has arrived yet")]
    NoGuest,
    /// Impossible control data: it is damaged, or belongs to another guest.
    #[error("worker {worker}: {why}; its control data is damaged or not that of this guest")]
    Control {
        /// Index of the worker.
        worker: usize,
        /// The broken rule of the control data.
        why: String,
    },
    /// RAM could not be read.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// Largest number of violations that a verdict lists.
pub const LISTED: usize = 32;

/// Checks every page of every worker, with up to 4 threads.
///
/// # Errors
/// [`CheckError::Control`] if a share is not in `ram`, [`CheckError::Ram`] if it cannot be read.
pub fn check(ram: &GuestRam, cut: &Cut) -> Result<Verdict, CheckError> {
    let mut tally = verdict::Tally::default();
    for (index, worker) in cut.workers.iter().enumerate() {
        if let Some(why) = misplaced(ram, &worker.share) {
            return Err(CheckError::Control { worker: index, why });
        }
        if let Some(witness) = worker.witness {
            let counted = cut.workers.get(witness.worker).map_or(0, |other| other.steps);
            if witness.steps > counted {
                tally.add(Violation::Order {
                    worker: index,
                    other: witness.worker,
                    saw: witness.steps,
                    counted,
                });
            }
        }
    }
    pages::check(ram, cut, &mut tally)?;
    Ok(tally.verdict())
}

fn misplaced(ram: &GuestRam, share: &Share) -> Option<String> {
    share.segments().iter().find_map(|segment| {
        let pages = ram.blocks().get(segment.block).map_or(0, |block| block.pages());
        let end = segment.first_page.checked_add(segment.pages);
        (end.is_none_or(|end| end > pages)).then(|| format!("its share {segment:?} is not in RAM"))
    })
}
