//! The pages of one round, each taken by exactly one lane.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterna_ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, RamError};

use super::geometry::{Geometry, Range};
use super::{PageRun, SliceSize};
use crate::threads::call;

/// A set of pages to send, and which of them lanes have claimed.
pub(crate) struct RoundPages {
    number: u64,
    /// Pages not yet taken. A chunk's words are touched only by the lane that claimed it, and, before
    /// that, by the lane that re-arms its slice.
    bits: DirtyBitmaps,
    pages: u64,
    remaining: AtomicU64,
    /// In the round over all RAM: finds pages that were never populated, slice by slice.
    absent: Option<DirtyBitmaps>,
    /// In the first round of a guest that gives hints: pages that it does not use. They are not sent unless a lane has claimed
    /// them before.
    free: Option<DirtyBitmaps>,
    geometry: Geometry,
    cursor: AtomicU64,
    rearmed_chunks: AtomicU64,
    size: SliceSize,
    slices: Vec<OnceLock<Result<(), RearmError>>>,
    /// Slices that were re-armed, and how long that took.
    rearms: AtomicU64,
    rearm_nanos: AtomicU64,
    sends_zeros: bool,
}

/// Why a slice could not be prepared for reading.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct RearmError(String);

impl From<DirtyError> for RearmError {
    fn from(error: DirtyError) -> Self {
        Self(error.to_string())
    }
}

impl From<RamError> for RearmError {
    fn from(error: RamError) -> Self {
        Self(error.to_string())
    }
}

/// Pages that a lane took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// The pages, all in one block.
    pub run: PageRun,
    /// They were never populated: zero, and must not be read.
    pub absent: bool,
}

/// A lane's place in a round.
#[derive(Debug, Default)]
pub(crate) struct LaneCursor {
    chunk: Option<Range>,
    rearming: Duration,
    free_pages: u64,
}

impl LaneCursor {
    /// Time that went into making slices ready, or into waiting for another lane that did, since the last call.
    pub(crate) fn take_rearming(&mut self) -> Duration {
        std::mem::take(&mut self.rearming)
    }

    /// Pages that were left out because the guest does not use them, since the last call.
    pub(crate) fn take_free_pages(&mut self) -> u64 {
        std::mem::take(&mut self.free_pages)
    }
}

impl RoundPages {
    /// A round over `bits`, re-armed by slices of `size`; `look_for_absent` where bits stand for all RAM rather than for
    /// writes.
    pub(crate) fn new(
        number: u64,
        ram: &GuestRam,
        size: SliceSize,
        bits: DirtyBitmaps,
        look_for_absent: bool,
    ) -> Self {
        let geometry = Geometry::new(ram, size);
        let pages = bits.count();
        Self {
            number,
            pages,
            remaining: AtomicU64::new(pages),
            absent: look_for_absent.then(|| DirtyBitmaps::new(ram)),
            free: None,
            cursor: AtomicU64::new(0),
            rearmed_chunks: AtomicU64::new(0),
            size,
            slices: (0..geometry.slices()).map(|_| OnceLock::new()).collect(),
            rearms: AtomicU64::new(0),
            rearm_nanos: AtomicU64::new(0),
            geometry,
            bits,
            sends_zeros: false,
        }
    }

    /// The same, with pages that are zero sent like all others.
    pub(crate) fn sending_zeros(self) -> Self {
        Self { sends_zeros: true, ..self }
    }

    /// The same, without pages that the guest does not use ([`RoundPages::hint`]).
    pub(crate) fn taking_hints(self, ram: &GuestRam) -> Self {
        Self { free: Some(DirtyBitmaps::new(ram)), ..self }
    }

    /// The guest does not use these pages, and did not when every page of the round had been re-armed. Pages that are not there
    /// are ignored. Not while [`RoundPages::drop_unsent`] is at work, or between it and its sync.
    pub(crate) fn hint(&self, block: usize, first: u64, count: u64) {
        if let Some(bits) = self.free.as_ref().and_then(|free| free.blocks().get(block)) {
            let count = count.min(bits.pages().saturating_sub(first));
            if count > 0 {
                bits.set_range(first, count);
            }
        }
    }

    /// Whether pages that are zero are sent like all others.
    pub(crate) fn sends_zeros(&self) -> bool {
        self.sends_zeros
    }

    /// How much should be re-armed at once after what this round has seen.
    pub(crate) fn next_slices(&self) -> SliceSize {
        let time = Duration::from_nanos(self.rearm_nanos.load(Ordering::Relaxed));
        self.size.after(self.rearms.load(Ordering::Relaxed), time)
    }

    /// Whether pages that were never populated are found among its pages.
    pub(crate) fn looks_for_absent(&self) -> bool {
        self.absent.is_some()
    }

    /// Pages that are not sent unless a lane has claimed them before: the guest does not use them.
    pub(crate) fn unused(&self) -> Option<&DirtyBitmaps> {
        self.free.as_ref()
    }

    /// Counted from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Pages that the round began with.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Lanes claim no further chunk: what no lane has claimed stays [unsent](RoundPages::unsent).
    pub(crate) fn abandon(&self) {
        // Far behind the last, and lanes may still count on from there.
        self.cursor.store(u64::MAX / 2, Ordering::Relaxed);
    }

    /// The pages that no lane has taken yet; all of them before the round is published.
    pub(crate) fn unsent(&self) -> &DirtyBitmaps {
        &self.bits
    }

    /// Pages that no lane has taken yet.
    pub(crate) fn remaining_pages(&self) -> u64 {
        self.remaining.load(Ordering::Relaxed)
    }

    /// Drops from `reported`, the result of a sync just now, the pages that this round still has to read: it will read
    /// them later than they were reported. Pages that it found absent or that the guest does not use it does not read; while it
    /// may still find absent ones, nothing is dropped. Gives how many.
    pub(crate) fn drop_unsent(&self, reported: &mut DirtyBitmaps) -> u64 {
        if !self.is_searched() {
            return 0;
        }
        let not_read = [&self.absent, &self.free].into_iter().flatten();
        let will_not_be_read: Vec<_> = not_read.flat_map(|pages| both(reported, pages)).collect();
        let dropped = reported.drop_reported(&self.bits);
        dropped - put(&will_not_be_read, reported)
    }

    /// Whether the search for absent pages is complete, if there is one.
    pub(crate) fn is_searched(&self) -> bool {
        self.absent.is_none() || self.is_rearmed()
    }

    /// Whether every chunk is claimed and every slice re-armed: from now on a sync reports only
    /// writes that this round may have missed.
    pub(crate) fn is_rearmed(&self) -> bool {
        self.rearmed_chunks.load(Ordering::Acquire) == self.geometry.chunks()
    }

    /// The next pages for a lane, at most `most`; `None` when every chunk is claimed.
    pub(crate) fn take(
        &self,
        at: &mut LaneCursor,
        most: u64,
        ram: &GuestRam,
        dirty: &dyn DirtySource,
    ) -> Result<Option<Taken>, RearmError> {
        loop {
            let chunk = match &mut at.chunk {
                Some(chunk) => chunk,
                None => {
                    let number = self.cursor.fetch_add(1, Ordering::Relaxed);
                    if number >= self.geometry.chunks() {
                        return Ok(None);
                    }
                    let chunk = self.geometry.chunk(number);
                    self.prepare_slice(at, chunk, ram, dirty)?;
                    self.leave_out_free(at, chunk);
                    self.rearmed_chunks.fetch_add(1, Ordering::AcqRel);
                    at.chunk.insert(chunk)
                }
            };
            match self.bits.block(chunk.block).take_run(chunk.first, chunk.end, most) {
                Some(run) => {
                    chunk.first = run.first + run.count;
                    let taken = self.split_absent(chunk, run.first, run.count);
                    self.remaining.fetch_sub(taken.run.count, Ordering::Relaxed);
                    return Ok(Some(taken));
                }
                None => at.chunk = None,
            }
        }
    }

    /// Re-arms, of the round or beside it, `pages` and no others, and calls every slice ready: the pages of the round that are not among
    /// them were re-armed before.
    pub(crate) fn rearmed_with(
        self,
        pages: &DirtyBitmaps,
        ram: &GuestRam,
        dirty: &dyn DirtySource,
    ) -> Result<Self, RearmError> {
        for (number, done) in (0..).zip(&self.slices) {
            if let Some(slice) = self.geometry.slice(number) {
                done.get_or_init(|| self.rearm(slice, pages, ram, dirty)).clone()?;
            }
        }
        Ok(self)
    }

    /// Makes slice number `number` ready before a lane comes to it. False: there is no such slice.
    pub(crate) fn prepare(
        &self,
        number: u64,
        ram: &GuestRam,
        dirty: &dyn DirtySource,
    ) -> Result<bool, RearmError> {
        let Some(slice) = self.geometry.slice(number) else { return Ok(false) };
        self.prepare_slice(&mut LaneCursor::default(), slice, ram, dirty)?;
        Ok(true)
    }

    /// Takes pages that the guest does not use out of a chunk that was just claimed.
    fn leave_out_free(&self, at: &mut LaneCursor, chunk: Range) {
        let Some(free) = &self.free else { return };
        let (bits, free) = (self.bits.block(chunk.block), free.block(chunk.block));
        let mut first = chunk.first;
        let mut left_out = 0;
        while let Some(run) = free.next_run(first, chunk.end, u64::MAX) {
            left_out += bits.clear_range(run.first, run.count);
            first = run.end();
        }
        at.free_pages += left_out;
        self.remaining.fetch_sub(left_out, Ordering::Relaxed);
    }

    /// Makes the chunk's slice ready for reading: re-armed first, then searched for absent pages, so that
    /// a page that appears after the search is reported dirty.
    fn prepare_slice(
        &self,
        at: &mut LaneCursor,
        chunk: Range,
        ram: &GuestRam,
        dirty: &dyn DirtySource,
    ) -> Result<(), RearmError> {
        let (number, slice) = self.geometry.slice_of(chunk.block, chunk.first);
        let rearm = || self.rearm(slice, &self.bits, ram, dirty);
        let done = &self.slices[number as usize];
        if let Some(done) = done.get() {
            return done.clone();
        }
        let began = Instant::now();
        let done = done.get_or_init(rearm).clone();
        at.rearming += began.elapsed();
        done
    }

    fn rearm(
        &self,
        slice: Range,
        pages: &DirtyBitmaps,
        ram: &GuestRam,
        dirty: &dyn DirtySource,
    ) -> Result<(), RearmError> {
        let count = slice.end - slice.first;
        let bits = pages.block(slice.block);
        if bits.next_run(slice.first, slice.end, 1).is_some() {
            let began = Instant::now();
            call("DirtySource::rearm", || dirty.rearm(slice.block, slice.first, count, bits))?;
            self.rearms.fetch_add(1, Ordering::Relaxed);
            self.rearm_nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        if let Some(absent) = &self.absent {
            let absent = absent.block(slice.block);
            call("DirtySource::mark_absent", || {
                dirty.mark_absent(ram, slice.block, slice.first, count, absent)
            })?;
        }
        Ok(())
    }

    /// Cuts a taken run where absent and populated pages meet, and gives what remains back to the chunk.
    fn split_absent(&self, chunk: &mut Range, first: u64, count: u64) -> Taken {
        let block = chunk.block;
        let whole = PageRun { block, first, count };
        let Some(absent) = &self.absent else {
            return Taken { run: whole, absent: false };
        };
        let next = absent.block(block).next_run(first, first + count, count);
        let (keep, is_absent) = match next {
            None => (count, false),
            Some(run) if run.first == first => (run.count, true),
            Some(run) => (run.first - first, false),
        };
        let (run, after) = whole.split(keep);
        if let Some(after) = after {
            self.bits.block(block).set_range(after.first, after.count);
            chunk.first = after.first;
        }
        Taken { run, absent: is_absent }
    }
}

/// Words with bits that are set in both: block, index, bits.
fn both(one: &DirtyBitmaps, other: &DirtyBitmaps) -> Vec<(usize, usize, u64)> {
    let blocks = one.blocks().iter().zip(other.blocks()).enumerate();
    let words = blocks.flat_map(|(block, (one, other))| {
        let words = one.words().iter().zip(other.words()).enumerate();
        words.map(move |(index, (one, other))| {
            (block, index, one.load(Ordering::Relaxed) & other.load(Ordering::Acquire))
        })
    });
    words.filter(|(_, _, bits)| *bits != 0).collect()
}

/// Sets bits; gives how many were clear.
fn put(words: &[(usize, usize, u64)], into: &DirtyBitmaps) -> u64 {
    let newly = |&(block, index, bits): &(usize, usize, u64)| {
        let old = into.block(block).words()[index].fetch_or(bits, Ordering::AcqRel);
        u64::from((bits & !old).count_ones())
    };
    words.iter().map(newly).sum()
}
