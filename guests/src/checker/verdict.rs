//! What the checker says.

use std::fmt;

use super::LISTED;

/// Whether RAM is one consistent cut.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// It is.
    Consistent {
        /// Pages checked.
        pages: u64,
        /// Pages that a step wrote.
        written: u64,
        /// Steps of all workers.
        steps: u64,
    },
    /// It is not.
    Corrupt {
        /// Pages checked.
        pages: u64,
        /// Violations in all.
        total: u64,
        /// The first of them, at most [`LISTED`], workers in order, pages ascending.
        violations: Vec<Violation>,
    },
}

impl Verdict {
    /// Whether RAM is one consistent cut.
    pub fn is_consistent(&self) -> bool {
        matches!(self, Self::Consistent { .. })
    }
    /// Pages checked.
    pub fn pages(&self) -> u64 {
        match self {
            Self::Consistent { pages, .. } | Self::Corrupt { pages, .. } => *pages,
        }
    }
    /// What is wrong, the first of it.
    pub fn violations(&self) -> &[Violation] {
        match self {
            Self::Consistent { .. } => &[],
            Self::Corrupt { violations, .. } => violations,
        }
    }
}

/// Where a page is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePlace {
    /// Whose page.
    pub worker: usize,
    /// Its number in the share.
    pub page: u64,
    /// The block's name.
    pub block: String,
    /// Offset of the page in the block, in bytes.
    pub offset: u64,
}

/// One thing that cannot be in a consistent cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// A page holds what it must not.
    Page {
        /// Which.
        place: PagePlace,
        /// The last step that wrote it; 0: none, its fill is demanded.
        expected_step: u64,
        /// What it holds.
        damage: Damage,
    },
    /// A worker saw steps of another one that the other has not taken: their memory is of two instants.
    Order {
        /// The worker that saw.
        worker: usize,
        /// The other.
        other: usize,
        /// How many steps it saw.
        saw: u64,
        /// How many the other counted.
        counted: u64,
    },
    /// A worker's control data in RAM cannot be this guest's; its pages could not be checked.
    Control {
        /// Whose.
        worker: usize,
        /// Which rule it breaks.
        why: String,
    },
}

/// What is wrong with a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// It is whole, but of an older step (0: as at the guest's start): a later write was lost or overwritten.
    Stale {
        /// The step that wrote it.
        found_step: u64,
    },
    /// It is whole, but of a step that came after the cut.
    FromFuture {
        /// The step that wrote it.
        found_step: u64,
    },
    /// It holds words of two steps where it must hold those of one.
    Torn {
        /// The step of its first word.
        first_step: u64,
        /// Another step that is found in it.
        other_step: u64,
        /// Offset in the page, in bytes, of the first word that is not of `first_step`.
        at: usize,
    },
    /// It is another page's content.
    Duplicate {
        /// Whose page.
        of_worker: u64,
        /// Its number in that share.
        of_page: u64,
        /// The step that wrote it there; 0: that page's fill.
        found_step: u64,
    },
    /// It is zero and must not be.
    Zeroed,
    /// Nothing that the guest ever wrote.
    Garbage {
        /// Offset in the page, in bytes, of the first wrong word.
        at: usize,
        /// The word that must be there.
        expected: u64,
        /// The word that is.
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
            Self::Page { place: PagePlace { worker, page, block, offset }, expected_step, damage } => {
                write!(
                    f,
                    "worker {worker} page {page} ({block}+{offset:#x}): expected step {expected_step}, {damage}"
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

/// Counts while the check goes on.
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
