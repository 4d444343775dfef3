//! How much RAM of a main channel has passed, and how much is left.

use sterna_wire::PAGE_SIZE;
use sterna_wire::ram::BlockList;

const PAGE: u64 = PAGE_SIZE as u64;
/// The share of a round's addresses from which on its own pages tell how many are left: one eighth.
const OWN_PAGES_COUNT: u64 = 8;

/// The RAM of one main channel, counted while it passes.
///
/// A stream does not state how many pages of a round are dirty. The first round has every page, so that its remaining
/// bytes are exact. Those of later rounds are estimates: from the number of pages at this place of the round, or, near
/// its start, from the round before.
#[derive(Debug, Clone, Default)]
pub struct RamProgress {
    /// First byte of each block, if the blocks are put one after the other.
    starts: Vec<u64>,
    total: u64,
    /// Bytes from the first one of all blocks to the end of the last page.
    position: u64,
    /// Round, its pages, and the pages of the round before.
    round: u32,
    round_pages: u64,
    last_round_pages: u64,
    pages: u64,
    /// PART sections that are over.
    parts: u64,
    /// Bytes that the destination has dropped at the start of postcopy, and pages since then.
    discarded: u64,
    postcopy_pages: u64,
    is_postcopy: bool,
    is_over: bool,
}

impl RamProgress {
    /// Bytes of the guest's RAM; `None` before the stream has stated them.
    pub fn total_bytes(&self) -> Option<u64> {
        (self.total > 0).then_some(self.total)
    }

    /// Bytes that still have to pass, as far as they are known now; see the type. `None` if the main channel has no
    /// pages (they pass in multifd channels), or before RAM.
    ///
    /// In postcopy: the pages that the destination lacked at the start without those that the main channel has carried.
    /// Pages of a preempt channel are not subtracted.
    pub fn remaining_bytes(&self) -> Option<u64> {
        if self.total == 0 {
            return None;
        }
        if self.is_over {
            return Some(0);
        }
        if self.is_postcopy {
            return Some(self.discarded.saturating_sub(self.postcopy_pages * PAGE));
        }
        if self.pages == 0 {
            return (self.parts == 0).then_some(self.total);
        }
        let rest = self.total.saturating_sub(self.position);
        if self.round <= 1 {
            return Some(rest);
        }
        let by_own = (u128::from(self.round_pages * PAGE) * u128::from(rest)
            / u128::from(self.position.max(1))) as u64;
        let is_early = self.position < self.total / OWN_PAGES_COUNT;
        let expected = if is_early && self.round > 2 {
            (self.last_round_pages * PAGE).saturating_sub(self.round_pages * PAGE)
        } else {
            by_own
        };
        Some(expected.min(rest))
    }

    /// The round, from 1; 0 before RAM.
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Pages that the main channel has carried.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages of the round before this one.
    pub fn last_round_pages(&self) -> u64 {
        self.last_round_pages
    }

    /// Sections of RAM that are over, without the first and the last one.
    pub fn parts(&self) -> u64 {
        self.parts
    }

    pub(super) fn begin(&mut self, list: &BlockList) {
        let mut total = 0_u64;
        self.starts = list
            .blocks
            .iter()
            .map(|block| {
                let start = total;
                total = total.saturating_add(block.length_bytes);
                start
            })
            .collect();
        (self.total, self.round) = (total, 1);
    }

    pub(super) fn page(&mut self, (block, offset): (usize, u64)) {
        self.pages += 1;
        if self.is_postcopy {
            self.postcopy_pages += 1;
            return;
        }
        self.round_pages += 1;
        let start = self.starts.get(block).copied().unwrap_or(self.total);
        self.position = start.saturating_add(offset).saturating_add(PAGE).min(self.total);
    }

    /// The next page, or what multifd channels carry now, belongs to another round.
    pub(super) fn next_round(&mut self) {
        self.round += 1;
        self.last_round_pages = std::mem::take(&mut self.round_pages);
        self.position = 0;
    }

    pub(super) fn part_is_over(&mut self) {
        self.parts += 1;
    }

    pub(super) fn discard(&mut self, ranges: &[(u64, u64)]) {
        self.discarded = ranges.iter().fold(self.discarded, |sum, (_, length)| sum.saturating_add(*length));
    }

    pub(super) fn in_postcopy(&mut self) {
        self.is_postcopy = true;
    }

    pub(super) fn end(&mut self) {
        self.is_over = true;
    }
}
