//! The page order: which page is sent next, and when a round ends.
//!
//! A *round* is a set of dirty pages that lanes send between two flushes of the wire (specs/stream.md §3.5).
//! The following clauses apply within a round. Tests in this module check each clause. For each clause, another
//! test violates it around the engine, and the guests' checker must detect the violation
//! (`tests/engine/page_order`):
//!
//! 1. A page is sent at most once per round, over all lanes. Bits that a sync finds meanwhile belong to the
//!    next round.
//! 2. Per page: take the bit, re-arm, then read.
//! 3. Re-arm only bits that a sync found. Re-arming another bit loses a write.
//! 4. Re-arm a whole slice before any lane reads from it.
//! 5. A lane writes SYNC after its last page of the round. The flush follows when all SYNCs are written.
//! 6. A sync may begin while the round is still being sent. Of the pages that it reports, only those are
//!    dropped that are unsent *after* the sync and will be read, because they are read later. A page that was
//!    found absent is sent as zero without being read. A page that the guest does not use is not sent at all.
//! 7. For a checkpoint of a protected guest, all slices are re-armed before the guest is resumed. By then every
//!    page is copied, sent, or write-protected until it is copied (`tests/engine/protected/copied`).
//!
//! Lanes claim chunks from the round's shared cursor. There is no thread that distributes pages to them.

mod geometry;
mod queue;
mod round_pages;
mod slice_size;
#[cfg(test)]
mod tests;

pub(crate) use queue::{Next, RoundQueue};
#[cfg(test)]
pub(crate) use round_pages::Taken;
pub(crate) use round_pages::{LaneCursor, RearmError, RoundPages};
pub(crate) use slice_size::SliceSize;

/// A run of neighbouring pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// Index of the block in [`sterna_ram::GuestRam`].
    pub block: usize,
    /// First page of the run, counted from the start of the block.
    pub first: u64,
    /// Number of pages in the run, at least 1.
    pub count: u64,
}

impl PageRun {
    /// The page after the last page of the run.
    pub fn end(self) -> u64 {
        self.first + self.count
    }

    /// Splits the run after `count` pages. The second part is `None` if it would be empty.
    pub fn split(self, count: u64) -> (Self, Option<Self>) {
        if count >= self.count {
            return (self, None);
        }
        let head = Self { count, ..self };
        let tail = Self { first: self.first + count, count: self.count - count, ..self };
        (head, Some(tail))
    }
}
