//! Moves the log bits of one range of guest-physical memory into its block's bitmap.
//!
//! The words of the log are taken piece by piece. Those that are not zero are listed, and merged from the list
//! with the range's shift. A log has few such words, and each needs an atomic instruction, so vectors would not
//! be faster. Threads share a large range. Bits that a thread has for the first word of the next thread are
//! merged at the end.

use std::mem;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::drain::{Found, LogWord, drain};
use crate::bitmap::PageBitmap;
use crate::dirty::sync_report::{SyncReport, SyncTimes};
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::merge;
use crate::page::PAGE_BYTES;

/// Words that are read before the list is merged. The list then stays in the second-level cache.
const PIECE: usize = 8192;

/// Pages of a block and their guest-physical address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoggedRange {
    /// Guest-physical address of the first page, in bytes.
    pub guest_address: u64,
    /// Index of the block.
    pub block: usize,
    /// Index of the first page in the block.
    pub first_page: u64,
    /// Number of pages of 4 KiB.
    pub pages: u64,
}

/// Refuses invalid ranges, and returns the bytes of a log for the valid ones.
pub(super) fn check(ram: &GuestRam, ranges: &[LoggedRange]) -> Result<u64, DirtyError> {
    let mut spans = Vec::with_capacity(ranges.len());
    for (index, range) in ranges.iter().enumerate() {
        let refuse = |rule| Err(DirtyError::GuestRange { index, rule });
        let Some(block) = ram.blocks().get(range.block) else {
            return refuse("it names a block that the guest RAM does not have");
        };
        let end = range.first_page.checked_add(range.pages);
        if range.pages == 0 || end.is_none_or(|end| end > block.pages()) {
            return refuse("it is not inside its block");
        }
        if !range.guest_address.is_multiple_of(PAGE_BYTES) {
            return refuse("its guest address is not page-aligned");
        }
        let Some(end) = range.guest_page().checked_add(range.pages) else {
            return refuse("it ends after the last address");
        };
        spans.push((range.guest_page(), end, index));
    }
    spans.sort_unstable();
    if let Some(pair) = spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(DirtyError::GuestRange {
            index: pair[1].2,
            rule: "the guest sees another range at the same address",
        });
    }
    Ok(spans.last().map_or(0, |(_, end, _)| end.div_ceil(8)))
}

impl LoggedRange {
    fn guest_page(&self) -> u64 {
        self.guest_address / PAGE_BYTES
    }

    /// Moves the range's bits from the guest's log into its block's bitmap.
    pub(super) fn sync(&self, log: &[AtomicU64], bitmap: &mut PageBitmap) -> SyncReport {
        let began = Instant::now();
        let (first, end) = (self.guest_page(), self.guest_page() + self.pages);
        // The log's first word belongs to word `base` of the bitmap, shifted up by `bits`. If the range begins
        // inside a word, `base` may be -1. The bits before the bitmap's begin then belong to other ranges.
        let at = self.first_page as i64 - (first % 64) as i64;
        let (base, bits) = (at.div_euclid(64), at.rem_euclid(64) as u32);
        let source = Source {
            log: &log[(first / 64) as usize..end.div_ceil(64) as usize],
            first_mask: u64::MAX << (first % 64),
            last_mask: u64::MAX >> (63 - (end - 1) % 64),
            bits,
        };
        let done = bitmap.with_words(|words| source.gather(words, base));
        let mut times = SyncTimes::default();
        let (took, worked) = (began.elapsed(), done.drained + done.merged);
        let share = done.drained.as_secs_f64() / worked.as_secs_f64().max(f64::MIN_POSITIVE);
        times.vhost = took.mul_f64(share.clamp(0.0, 1.0)).min(took);
        times.add_merge(bits, took - times.vhost);
        SyncReport { newly_dirty: done.newly, times }
    }
}

/// The words of a range in the log.
#[derive(Clone, Copy)]
struct Source<'a> {
    log: &'a [AtomicU64],
    /// Masks of the range's bits in its first and in its last word.
    first_mask: u64,
    last_mask: u64,
    /// The shift of the words in the bitmap.
    bits: u32,
}

/// The result of a part of the work, or of all parts.
#[derive(Default)]
struct Done {
    newly: u64,
    drained: Duration,
    merged: Duration,
    /// Bits for the word after the given ones.
    over: u64,
}

impl Source<'_> {
    /// Moves all bits into the bitmap's `words`. The log's first word belongs to word `base`, which is at least
    /// -1.
    fn gather(&self, words: &mut [u64], base: i64) -> Done {
        let skipped = usize::from(base < 0);
        let behind = (base + self.log.len() as i64) as usize;
        let threads = merge::threads_for(self.log.len());
        let part = self.log.len().div_ceil(threads);
        let mut rest = &mut words[base.max(0) as usize..behind];
        let parts: Vec<_> = (0..self.log.len())
            .step_by(part)
            .map(|from| {
                let to = (from + part).min(self.log.len());
                let skipped = if from == 0 { skipped } else { 0 };
                let (into, after) = mem::take(&mut rest).split_at_mut(to - from - skipped);
                rest = after;
                (from..to, into, skipped)
            })
            .collect();
        let work = |(part, into, skipped): (Range<usize>, &mut [u64], usize)| {
            (part.end, self.work(part, into, skipped))
        };
        let all: Vec<(usize, Done)> = merge::share(threads, parts.into_iter(), work);
        let mut sum = Done::default();
        for (end, done) in all {
            sum.newly += done.newly;
            sum.drained += done.drained;
            sum.merged += done.merged;
            if let Some(word) = words.get_mut((base + end as i64) as usize) {
                sum.newly += merge::add(word, done.over);
            }
        }
        sum
    }

    /// Moves a part of the log's words into the bitmap's words `into`. The first `skipped` words of the part
    /// have no target.
    fn work(&self, part: Range<usize>, into: &mut [u64], skipped: usize) -> Done {
        let mut done = Done::default();
        let mut found = Vec::with_capacity(part.len().min(PIECE));
        for first in part.clone().step_by(PIECE) {
            let began = Instant::now();
            self.take(first..(first + PIECE).min(part.end), &mut found);
            let drained = Instant::now();
            for &(index, bits) in &found {
                self.merge(index - part.start, bits, into, skipped, &mut done);
            }
            found.clear();
            done.drained += drained - began;
            done.merged += drained.elapsed();
        }
        done
    }

    /// Merges one word; `at` is its index in the part.
    #[inline]
    fn merge(&self, at: usize, bits: u64, into: &mut [u64], skipped: usize, done: &mut Done) {
        // If `bits` is 0, nothing is carried into the next word. Two shifts are needed, because a shift by 64
        // would overflow.
        let (low, high) = (bits << self.bits, (bits >> 1) >> (63 - self.bits));
        // If the bitmap has no word for `low`, `low` has no bit of the range.
        if at >= skipped {
            done.newly += merge::add(&mut into[at - skipped], low);
        }
        if high != 0 {
            match into.get_mut(at + 1 - skipped) {
                Some(word) => done.newly += merge::add(word, high),
                None => done.over |= high,
            }
        }
    }

    /// Takes the words of `part` out of the log. At the ends of the range, it takes only the range's own bits.
    fn take(&self, part: Range<usize>, found: &mut Vec<Found>) {
        let Range { start: mut from, end: mut to } = part;
        let mut take_part = |index: usize| {
            if self.log[index].peek() & self.mask(index) != 0 {
                found.push((index, self.log[index].take_part(self.mask(index))));
            }
        };
        if self.mask(from) != u64::MAX {
            take_part(from);
            from += 1;
        }
        if from < to && self.mask(to - 1) != u64::MAX {
            to -= 1;
            take_part(to);
        }
        drain(&self.log[from..to], from, found);
    }

    fn mask(&self, index: usize) -> u64 {
        let first = if index == 0 { self.first_mask } else { u64::MAX };
        let last = if index + 1 == self.log.len() { self.last_mask } else { u64::MAX };
        first & last
    }
}
