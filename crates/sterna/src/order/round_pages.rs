//! The pages of one round. Each is taken by exactly one lane.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sterna_ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, RamError};

use super::geometry::{Geometry, Range};
use super::{PageRun, SliceSize};
use crate::error::Cause;
use crate::threads::call;

/// The pages to send, and which of them lanes have claimed.
pub(crate) struct RoundPages {
    number: u64,
    /// Pages that were not taken yet. A chunk's words are used only by the lane that has claimed it and, before
    /// that, by the lane that re-arms its slice.
    bits: DirtyBitmaps,
    pages: u64,
    remaining: AtomicU64,
    /// In the round over all RAM: pages that were never populated. They are detected slice by slice.
    absent: Option<DirtyBitmaps>,
    /// In the first round of a guest that gives free page hints: pages that the guest does not use. They are
    /// not sent unless a lane has claimed them before.
    free: Option<DirtyBitmaps>,
    geometry: Geometry,
    cursor: AtomicU64,
    rearmed_chunks: AtomicU64,
    size: SliceSize,
    slices: Vec<OnceLock<Result<(), RearmError>>>,
    /// Number of slices that were re-armed, and the time it took.
    rearms: AtomicU64,
    rearm_nanos: AtomicU64,
    sends_zeros: bool,
}

/// Why a slice could not be prepared for reading.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct RearmError(#[source] Cause);

impl From<DirtyError> for RearmError {
    fn from(error: DirtyError) -> Self {
        Self(Arc::new(error))
    }
}

impl From<RamError> for RearmError {
    fn from(error: RamError) -> Self {
        Self(Arc::new(error))
    }
}

/// Pages that a lane has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// The pages, all in one block.
    pub run: PageRun,
    /// The pages were never populated. They are zero, and must not be read.
    pub absent: bool,
}

/// A lane's position in a round.
#[derive(Debug, Default)]
pub(crate) struct LaneCursor {
    chunk: Option<Range>,
    rearming: Duration,
    free_pages: u64,
}

impl LaneCursor {
    /// Time since the last call that was spent preparing slices, or waiting for another lane to prepare one.
    pub(crate) fn take_rearming(&mut self) -> Duration {
        std::mem::take(&mut self.rearming)
    }

    /// Number of pages since the last call that were left out because the guest does not use them.
    pub(crate) fn take_free_pages(&mut self) -> u64 {
        std::mem::take(&mut self.free_pages)
    }
}

impl RoundPages {
    /// A round over `bits`, re-armed in slices of `size`. `look_for_absent`: the bits mean all RAM, so absent
    /// pages are possible. Without it they mean written pages.
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

    /// The same round, in which zero pages are sent with their content like all others.
    pub(crate) fn sending_zeros(self) -> Self {
        Self { sends_zeros: true, ..self }
    }

    /// The same round, without pages that the guest does not use ([`RoundPages::hint`]).
    pub(crate) fn taking_hints(self, ram: &GuestRam) -> Self {
        Self { free: Some(DirtyBitmaps::new(ram)), ..self }
    }

    /// Records pages that the guest does not use. Pages outside of RAM are ignored.
    ///
    /// The guest must not have used them either when every page of the round had been re-armed.
    /// Do not call this during [`RoundPages::drop_unsent`], or between it and the sync before it.
    pub(crate) fn hint(&self, block: usize, first: u64, count: u64) {
        if let Some(bits) = self.free.as_ref().and_then(|free| free.blocks().get(block)) {
            let count = count.min(bits.pages().saturating_sub(first));
            if count > 0 {
                bits.set_range(first, count);
            }
        }
    }

    /// Whether zero pages are sent with their content like all others.
    pub(crate) fn sends_zeros(&self) -> bool {
        self.sends_zeros
    }

    /// The size of the next round's slices, adapted to this round's measurements.
    pub(crate) fn next_slices(&self) -> SliceSize {
        let time = Duration::from_nanos(self.rearm_nanos.load(Ordering::Relaxed));
        self.size.after(self.rearms.load(Ordering::Relaxed), time)
    }

    /// Whether absent pages are detected in this round.
    #[cfg(feature = "reconnect")]
    pub(crate) fn looks_for_absent(&self) -> bool {
        self.absent.is_some()
    }

    /// Pages that are not sent unless a lane has claimed them before, because the guest does not use them.
    #[cfg(feature = "reconnect")]
    pub(crate) fn unused(&self) -> Option<&DirtyBitmaps> {
        self.free.as_ref()
    }

    /// The round's number, counted from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Number of pages at the beginning of the round.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Lets lanes claim no further chunk. Pages in unclaimed chunks stay [unsent](RoundPages::unsent).
    #[cfg(feature = "postcopy")]
    pub(crate) fn abandon(&self) {
        // Far beyond the last chunk, but far below the maximum, because lanes may still increment the cursor.
        self.cursor.store(u64::MAX / 2, Ordering::Relaxed);
    }

    /// The pages that no lane has taken yet. Before the round is published these are all its pages.
    #[cfg(any(feature = "postcopy", feature = "reconnect"))]
    pub(crate) fn unsent(&self) -> &DirtyBitmaps {
        &self.bits
    }

    /// Number of pages that no lane has taken yet.
    pub(crate) fn remaining_pages(&self) -> u64 {
        self.remaining.load(Ordering::Relaxed)
    }

    /// Drops the pages from `reported` that this round will still read. Returns their number.
    ///
    /// `reported` is the result of a sync that has just ended. The round reads these pages after the sync, so the
    /// reported writes are included.
    ///
    /// Absent pages, and pages that the guest does not use, are not read and therefore not dropped. Until the
    /// search for absent pages is complete, no page is dropped.
    pub(crate) fn drop_unsent(&self, reported: &mut DirtyBitmaps) -> u64 {
        if !self.is_searched() {
            return 0;
        }
        let not_read = [&self.absent, &self.free].into_iter().flatten();
        let will_not_be_read: Vec<_> = not_read.flat_map(|pages| both(reported, pages)).collect();
        let dropped = reported.drop_reported(&self.bits);
        dropped - put(&will_not_be_read, reported)
    }

    /// Whether the search for absent pages is complete, or was not requested.
    pub(crate) fn is_searched(&self) -> bool {
        self.absent.is_none() || self.is_rearmed()
    }

    /// Whether every chunk is claimed and every slice is re-armed. From then on a sync reports only writes that
    /// this round may have missed.
    pub(crate) fn is_rearmed(&self) -> bool {
        self.rearmed_chunks.load(Ordering::Acquire) == self.geometry.chunks()
    }

    /// Takes the next pages for a lane, at most `most`. `None`: every chunk is claimed.
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

    /// Re-arms exactly `pages`, of this round or not, and marks every slice as prepared. Pages of the round
    /// that are not in `pages` must have been re-armed before.
    #[cfg(feature = "standby")]
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

    /// Prepares slice number `number` before a lane reaches it. False: the slice does not exist.
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

    /// Removes the pages that the guest does not use from a chunk that was just claimed.
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

    /// Prepares the chunk's slice for reading: re-arms it first, then searches for absent pages. In this order,
    /// a page that is populated after the search is reported dirty.
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

    /// Cuts a taken run where absent and populated pages meet. The rest is given back to the chunk.
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

/// Words with bits that are set in both bitmaps, as block, index and bits.
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

/// Sets bits. Returns how many of them were clear.
fn put(words: &[(usize, usize, u64)], into: &DirtyBitmaps) -> u64 {
    let newly = |&(block, index, bits): &(usize, usize, u64)| {
        let old = into.block(block).words()[index].fetch_or(bits, Ordering::AcqRel);
        u64::from((bits & !old).count_ones())
    };
    words.iter().map(newly).sum()
}
