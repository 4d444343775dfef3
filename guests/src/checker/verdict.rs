//! The result of a check: verdict, violations and damage.

use std::fmt;

use super::LISTED;

/// Whether RAM is one consistent cut.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// RAM is one consistent cut.
    Consistent {
        /// Number of checked pages.
        pages: u64,
        /// Number of pages that a step wrote.
        written: u64,
        /// Number of steps of all workers.
        steps: u64,
    },
    /// RAM is no consistent cut.
    Corrupt {
        /// Number of checked pages.
        pages: u64,
        /// Total number of violations.
        total: u64,
        /// The first violations, at most [`LISTED`], ordered by worker and page.
        violations: Vec<Violation>,
    },
}

impl Verdict {
    /// Whether RAM is one consistent cut.
    pub fn is_consistent(&self) -> bool {
        matches!(self, Self::Consistent { .. })
    }
    /// Number of checked pages.
    pub fn pages(&self) -> u64 {
        match self {
            Self::Consistent { pages, .. } | Self::Corrupt { pages, .. } => *pages,
        }
    }
    /// The first violations, at most [`LISTED`]; empty if RAM is consistent.
    pub fn violations(&self) -> &[Violation] {
        match self {
            Self::Consistent { .. } => &[],
            Self::Corrupt { violations, .. } => violations,
        }
    }
}

/// The position of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePlace {
    /// Index of the worker that owns the page.
    pub worker: usize,
    /// Number of the page in the worker's share.
    pub page: u64,
    /// Name of the block.
    pub block: String,
    /// Offset of the page in the block, in bytes.
    pub offset: u64,
}

/// A state that a consistent cut cannot have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// A page with wrong content.
    Page {
        /// The place of the wrong page.
        place: PagePlace,
        /// The last step that wrote the page; 0 demands its fill.
        expected_step: u64,
        /// That step has zeroed the page.
        is_zero: bool,
        /// The kind of the wrong content.
        damage: Damage,
    },
    /// A worker saw steps of another worker that the other has not taken. Their memory is from two
    /// instants.
    Order {
        /// The worker that read the counter.
        worker: usize,
        /// The worker whose counter was read.
        other: usize,
        /// The value that was read.
        saw: u64,
        /// The number of steps that the other worker has counted.
        counted: u64,
    },
    /// Control data in RAM that cannot belong to this guest. The worker's pages could not be checked.
    Control {
        /// Index of the worker.
        worker: usize,
        /// The broken rule of the control data.
        why: String,
    },
}

/// The kind of wrong content of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// A complete page of an older step (0: as at the guest's start). A later write was lost or
    /// overwritten.
    Stale {
        /// The step that wrote it.
        found_step: u64,
    },
    /// A complete page of a step after the cut.
    FromFuture {
        /// The step that wrote it.
        found_step: u64,
    },
    /// Words of two steps in a page that must contain words of one.
    Torn {
        /// The step to which the first word belongs.
        first_step: u64,
        /// Another step to which words belong.
        other_step: u64,
        /// Offset in the page, in bytes, of the first word that is not of `first_step`.
        at: usize,
    },
    /// The content of another page.
    Duplicate {
        /// Index of the worker that owns the other page.
        of_worker: u64,
        /// Number of the other page in that worker's share.
        of_page: u64,
        /// The step that wrote the content there; 0 is the other page's fill.
        found_step: u64,
    },
    /// A page that is zero and must not be. A write was lost, or older zeros overwrote it.
    Zeroed,
    /// Content that the guest never wrote.
    Garbage {
        /// Offset in the page, in bytes, of the first wrong word.
        at: usize,
        /// The word that the model demands there.
        expected: u64,
        /// The word that RAM contains there.
        found: u64,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Consistent { pages, written, steps } => {
                write!(f, "consistent: {pages} pages checked, {written} of them written in {steps} steps")
            }
            Self::Corrupt { pages, total, violations } => {
                write!(f, "CORRUPT: {total} violations in {pages} pages")?;
                for violation in violations {
                    write!(f, "\n  {violation}")?;
                }
                match total - violations.len() as u64 {
                    0 => Ok(()),
                    more => write!(f, "\n  and {more} more"),
                }
            }
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Page {
                place: PagePlace { worker, page, block, offset },
                expected_step,
                is_zero,
                damage,
            } => {
                let zeros = if *is_zero { "zeros of " } else { "" };
                write!(
                    f,
                    "worker {worker} page {page} ({block}+{offset:#x}): expected {zeros}step {expected_step}, {damage}"
                )
            }
            Self::Order { worker, other, saw, counted } => write!(
                f,
                "worker {worker} saw {saw} steps of worker {other}, which has taken {counted}: memory of two instants"
            ),
            Self::Control { worker, why } => write!(f, "worker {worker}'s control data: {why}"),
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale { found_step: 0 } => write!(f, "stale: as at the start, every write lost"),
            Self::Stale { found_step } => write!(f, "stale: of step {found_step}"),
            Self::FromFuture { found_step } => write!(f, "from the future: of step {found_step}"),
            Self::Torn { first_step, other_step, at } => {
                write!(f, "torn: of step {first_step}, but of step {other_step} at byte {at}")
            }
            Self::Duplicate { of_worker, of_page, found_step } => {
                write!(f, "a duplicate of worker {of_worker}'s page {of_page} of step {found_step}")
            }
            Self::Zeroed => write!(f, "zeroed"),
            Self::Garbage { at, expected, found } => {
                write!(f, "garbage: {found:#018x} at byte {at} instead of {expected:#018x}")
            }
        }
    }
}

/// Counters of a check that is running.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub pages: u64,
    pub written: u64,
    pub steps: u64,
    pub total: u64,
    pub violations: Vec<Violation>,
}

impl Tally {
    pub fn add(&mut self, violation: Violation) {
        self.total += 1;
        if self.violations.len() < LISTED {
            self.violations.push(violation);
        }
    }

    pub fn append(&mut self, other: Self) {
        self.pages += other.pages;
        self.written += other.written;
        self.total += other.total;
        let room = LISTED - self.violations.len();
        self.violations.extend(other.violations.into_iter().take(room));
    }

    pub fn verdict(self) -> Verdict {
        let Self { pages, written, steps, total, violations } = self;
        match total {
            0 => Verdict::Consistent { pages, written, steps },
            _ => Verdict::Corrupt { pages, total, violations },
        }
    }
}
