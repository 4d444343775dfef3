//! Proves that RAM is one consistent cut of a guest that follows the [`crate::model`].
//!
//! The guest stands still. From each worker's counter, seed and history the checker computes every byte
//! of every page that the worker owns, and demands exactly these. It reads RAM through
//! [`sterna_ram::RamBlock::read`], and pages that were never populated not at all, so checking a sparse
//! guest leaves it sparse.
//!
//! What it demands:
//! - A page that a step wrote holds the words of the *last* step that wrote it, and its fill elsewhere.
//! - A page that no step wrote holds its fill.
//! - The page of a worker's next step may hold the first words of that step before words of the last one:
//!   any number of them, or exactly as many as the guest says ([`InFlight`]).
//! - No worker has seen more steps of another than that other has counted ([`Witness`]): memory of
//!   different workers is from one instant.
#![forbid(unsafe_code)]

mod diagnose;
mod pages;
mod verdict;

pub use verdict::{Damage, PagePlace, Verdict, Violation};

use sterna_ram::{GuestRam, RamError};

use crate::model::{Fill, History, Share, WordPlan};

/// How far a worker had come with the step after the last that it counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlight {
    /// Any number of words may be there: the guest was stopped between any two instructions.
    Unknown,
    /// As [`InFlight::Unknown`], and of the last word perhaps the low half only: the guest writes 32 bits
    /// at a time.
    UnknownHalves,
    /// Exactly so many.
    Words(usize),
}

/// What a worker saw of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// The other worker's index.
    pub worker: usize,
    /// Its counter as it was read.
    pub steps: u64,
}

/// A worker at the cut.
#[derive(Debug, Clone)]
pub struct WorkerCut {
    /// The pages it owns.
    pub share: Share,
    /// Steps that it counted.
    pub steps: u64,
    /// How far the next one had come.
    pub in_flight: InFlight,
    /// Its pattern over time.
    pub history: History,
    /// Its seed.
    pub seed: u64,
    /// What it saw of another worker.
    pub witness: Option<Witness>,
}

/// A guest at the cut.
#[derive(Debug, Clone)]
pub struct Cut {
    /// The words that a step writes.
    pub plan: WordPlan,
    /// What RAM held at the start.
    pub fill: Fill,
    /// The workers, in the order of their numbers.
    pub workers: Vec<WorkerCut>,
}

/// Why no verdict could be given.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The guest runs: its memory changes under the checker.
    #[error("the guest runs; stop it before checking")]
    Running,
    /// There is no guest yet.
    #[error("no guest has arrived yet")]
    NoGuest,
    /// A counter, share or history cannot be: they were damaged too, or are another guest's.
    #[error("worker {worker}: {why}; its control data is damaged or not that of this guest")]
    Control {
        /// Whose.
        worker: usize,
        /// Which rule it breaks.
        why: String,
    },
    /// RAM could not be read.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// Most violations that a verdict lists.
pub const LISTED: usize = 32;

/// Checks every page of every worker. Uses up to 4 threads.
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
