//! One range of guest-physical memory: its part of the log goes into its block's bitmap.
//!
//! The log's words are drained into a small buffer that stays in the cache, and merged from there, moved by
//! as many bits as the range lies crooked; what a piece's last word has for the next word of the bitmap is
//! carried over. Threads share a large range; what is carried over between two of them is merged at the
//! end.

use std::mem;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use super::drain::{LogWord, drain};
use crate::dirty::{Harvest, SyncTimes};
use crate::merge::{self, Method, Shifted};
use crate::{DirtyError, GuestRam, PAGE_BYTES, PageBitmap};

/// Words that are drained before they are merged: 32 KiB, which the second-level cache holds with ease.
const PIECE: usize = 4096;

/// Pages of a block and where the guest sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoggedRange {
    /// The guest-physical address, in bytes.
    pub guest_address: u64,
    /// Index of the block.
    pub block: usize,
    /// The first page of the block.
    pub first_page: u64,
    /// How many pages.
    pub pages: u64,
}

/// Refuses ranges that a log cannot have; gives the bytes of the log that they need.
pub(super) fn check(ram: &GuestRam, ranges: &[LoggedRange]) -> Result<u64, DirtyError> {
    let mut spans = Vec::with_capacity(ranges.len());
    for (index, range) in ranges.iter().enumerate() {
        let refuse = |rule| Err(DirtyError::GuestRange { index, rule });
        let Some(block) = ram.blocks().get(range.block) else {
            return refuse("it names a block that the guest RAM does not have");
        };
        let end = range.first_page.checked_add(range.pages);
        if range.pages == 0 || end.is_none_or(|end| end > block.pages()) {
            return refuse("it does not lie inside its block");
        }
        if !range.guest_address.is_multiple_of(PAGE_BYTES) {
            return refuse("its guest address is not that of a page");
        }
        let Some(end) = range.guest_page().checked_add(range.pages) else {
            return refuse("it ends behind the last address");
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

    /// Takes the range's bits out of the guest's whole log, into its block's bitmap.
    pub(super) fn harvest(&self, log: &[AtomicU64], bitmap: &mut PageBitmap) -> Harvest {
        let began = Instant::now();
        let (first, end) = (self.guest_page(), self.guest_page() + self.pages);
        // Where in the bitmap the first word of the log stands: in word `base`, moved up by `bits`. A range
        // that begins inside a word may stand before the bitmap's beginning, with bits that are not its own.
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
        Harvest { newly_dirty: done.newly, times }
    }
}

/// A range's words in the log.
#[derive(Clone, Copy)]
struct Source<'a> {
    log: &'a [AtomicU64],
    /// Which bits of the first and of the last word are the range's own.
    first_mask: u64,
    last_mask: u64,
    /// By how much they are moved up in the bitmap.
    bits: u32,
}

/// What was done, maybe on several threads.
#[derive(Default)]
struct Done {
    newly: u64,
    drained: Duration,
    merged: Duration,
    /// What belongs into the word behind those that were given.
    over: u64,
}

impl Source<'_> {
    /// Moves everything into the bitmap's `words`; the log's first word stands in word `base`, -1 or more.
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
        let all: Vec<(usize, Done)> = thread::scope(|scope| {
            let mut parts = parts.into_iter();
            let mine = parts.next();
            let others: Vec<_> = parts
                .map(|(part, into, skipped)| (part.end, scope.spawn(move || self.work(part, into, skipped))))
                .collect();
            let mine = mine.map(|(part, into, skipped)| (part.end, self.work(part, into, skipped)));
            // A thread that panicked is a bug that the scope passes on.
            let others = others.into_iter().map(|(end, other)| (end, other.join().unwrap_or_default()));
            mine.into_iter().chain(others).collect()
        });
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

    /// Moves a part of the log's words into the bitmap's words `into`, of which `skipped` are left out at
    /// the beginning.
    fn work(&self, part: Range<usize>, mut into: &mut [u64], mut skipped: usize) -> Done {
        let mut done = Done::default();
        let mut buffer = vec![0; part.len().min(PIECE) + 1];
        let mut at = part.start;
        while at < part.end {
            let count = (part.end - at).min(PIECE);
            let began = Instant::now();
            // The last word of the piece before stands in front: its upper bits go into this one's first.
            self.take(at, &mut buffer[1..=count]);
            let drained = Instant::now();
            let (now, rest) = mem::take(&mut into).split_at_mut(count - skipped);
            let from = Shifted::new(&buffer[..=count], self.bits).after(1 + skipped);
            done.newly += Method::best().merge(now, from);
            done.drained += drained - began;
            done.merged += drained.elapsed();
            buffer[0] = buffer[count];
            (into, skipped) = (rest, 0);
            at += count;
        }
        if self.bits > 0 {
            done.over = buffer[0] >> (64 - self.bits);
        }
        done
    }

    /// Takes the words from `first` on out of the log, of those at the ends only the range's own bits.
    fn take(&self, first: usize, out: &mut [u64]) {
        let (mut from, mut to) = (0, out.len());
        if self.mask(first) != u64::MAX {
            out[0] = self.log[first].take_part(self.mask(first));
            from = 1;
        }
        if from < to && self.mask(first + to - 1) != u64::MAX {
            to -= 1;
            out[to] = self.log[first + to].take_part(self.mask(first + to));
        }
        drain(&self.log[first + from..first + to], &mut out[from..to]);
    }

    fn mask(&self, index: usize) -> u64 {
        let first = if index == 0 { self.first_mask } else { u64::MAX };
        let last = if index + 1 == self.log.len() { self.last_mask } else { u64::MAX };
        first & last
    }
}
