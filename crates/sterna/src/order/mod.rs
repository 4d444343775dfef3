//! Which page next, and when a round ends: the page order.
//!
//! A *pass* is a set of dirty pages that lanes send between two flushes of the wire
//! (specs/stream.md §3.5). Its clauses, each held by tests of the pass here, and by one that violates it around the engine
//! and has the guests' checker notice (`tests/it/page_order`):
//!
//! 1. A page goes out at most once in a pass, over all lanes. Bits harvested meanwhile belong to the next.
//! 2. Per page: take the bit, re-arm the tracking, then read. Never the other way round.
//! 3. Re-arm only bits that were harvested: clearing any other loses a write.
//! 4. Re-arming covers a whole slice, and no lane reads from a slice before it is re-armed.
//! 5. A lane writes SYNC only after its last page of the pass; the flush is written after all SYNCs.
//! 6. A harvest may begin while the pass is still being sent. Of what it reports, pages that are unsent *after* it and
//!    will be read are dropped, for they are read later than they were reported; no others are. A page that was
//!    found absent is sent as zero without being read.
//!
//! There is no feeder thread: lanes claim chunks from the pass's shared cursor.

mod geometry;
mod pass;
mod queue;
mod slice_size;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use pass::Taken;
pub use pass::{LaneCursor, Pass, RearmError};
pub use queue::{Next, PassQueue};
pub use slice_size::SliceSize;

/// A run of neighbouring pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// Index of the block in [`sterna_ram::GuestRam`].
    pub block: usize,
    /// First page of the run, counted inside the block.
    pub first: u64,
    /// Pages in the run, at least 1.
    pub count: u64,
}

impl PageRun {
    /// One past the last page.
    pub fn end(self) -> u64 {
        self.first + self.count
    }

    /// The first `count` pages and the rest, if any.
    pub fn split(self, count: u64) -> (Self, Option<Self>) {
        if count >= self.count {
            return (self, None);
        }
        let head = Self { count, ..self };
        let tail = Self { first: self.first + count, count: self.count - count, ..self };
        (head, Some(tail))
    }
}
