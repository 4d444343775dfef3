//! Pages of a checkpoint that are protected, and copied after the guest resumed.
//!
//! The thread that first needs a grain copies it. That is the thread that copies all grains in order, a lane that
//! sends it, or the thread that serves the guest's writes. Then the writers of the grain are unblocked. Each
//! grain is copied once. Other threads wait until it is copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna_ram::write_protection::{WriteProtection, WriteProtectionError};
use sterna_ram::{GuestRam, PinnedRam, RamBlock};

use super::super::pieces::{Piece, bytes};
use super::spans::{grain_of, grains};

/// No thread has begun to copy the grain.
const PENDING: u8 = 0;
const COPYING: u8 = 1;
const COPIED: u8 = 2;
/// The grain could not be copied, and its content is lost.
const FAILED: u8 = 3;

/// Interval at which a thread checks a grain that another thread copies. A copy takes some microseconds.
const LOOK: Duration = Duration::from_micros(20);

/// The deferred pages of one checkpoint.
pub(in super::super) struct Deferred {
    ram: GuestRam,
    arena: RamBlock,
    pieces: Arc<[Piece]>,
    protection: Arc<WriteProtection>,
    grains: Vec<PageRun>,
    states: Vec<AtomicU8>,
    left: AtomicUsize,
    /// The protection was lifted from pages that were not copied.
    is_lost: AtomicBool,
    error: Mutex<Option<MigrationError>>,
    /// Keeps the kernel from reclaiming these pages: their content would be lost without a write.
    pins: Mutex<Vec<PinnedRam>>,
}

impl Deferred {
    /// Covers the pages of `pieces` in these spans, which are about to be protected.
    pub(super) fn new(
        (ram, arena): (&GuestRam, &RamBlock),
        pieces: Arc<[Piece]>,
        spans: &[PageRun],
        protection: &Arc<WriteProtection>,
    ) -> Result<Self, MigrationError> {
        let grains = grains(spans);
        let mut pins = Vec::new();
        for (index, block) in ram.blocks().iter().enumerate() {
            if protection.covers(index) {
                pins.push(block.pin(0, block.len_bytes())?);
            }
        }
        Ok(Self {
            ram: ram.clone(),
            arena: arena.clone(),
            pieces,
            protection: Arc::clone(protection),
            states: grains.iter().map(|_| AtomicU8::new(PENDING)).collect(),
            left: AtomicUsize::new(grains.len()),
            grains,
            is_lost: AtomicBool::new(false),
            error: Mutex::new(None),
            pins: Mutex::new(pins),
        })
    }

    /// Returns when these pages are copied. Copies them here, or waits for the thread that copies them.
    pub(in super::super) fn ensure(&self, run: PageRun) -> Result<(), MigrationError> {
        let first = self.grains.partition_point(|grain| (grain.block, grain.end()) <= (run.block, run.first));
        for index in first..self.grains.len() {
            let grain = self.grains[index];
            if grain.block != run.block || grain.first >= run.end() {
                break;
            }
            self.finish(index)?;
        }
        Ok(())
    }

    /// Copies all remaining grains in order, and waits for grains that other threads copy.
    ///
    /// # Errors
    /// The first error. The other grains are copied and unblocked all the same.
    pub(super) fn finish_all(&self) -> Result<(), MigrationError> {
        let mut done = Ok(());
        for index in 0..self.grains.len() {
            let finished = self.finish(index);
            done = done.and(finished);
        }
        done
    }

    /// Unblocks a writer of this page after the page is copied. Does not wait for other threads.
    pub(super) fn let_through(&self, block: usize, page: u64) {
        let state = grain_of(&self.grains, block, page).map(|index| (index, self.claim(index)));
        match state {
            Some((index, Ok(()))) => self.copy(index),
            // The thread that copies the grain unblocks all its writers afterwards.
            Some((_, Err(COPYING))) => {}
            // The page was unblocked before its protection was complete, or it is not a page of this checkpoint.
            _ => self.release(PageRun { block, first: page, count: 1 }),
        }
    }

    /// Whether each grain is copied, or has failed.
    pub(super) fn is_finished(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    fn finish(&self, index: usize) -> Result<(), MigrationError> {
        loop {
            match self.claim(index) {
                Ok(()) => self.copy(index),
                Err(COPIED) => return Ok(()),
                Err(FAILED) => return Err(self.why()),
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    }

    fn claim(&self, index: usize) -> Result<(), u8> {
        let state = &self.states[index];
        state.compare_exchange(PENDING, COPYING, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }

    /// Copies a grain that this thread has claimed.
    fn copy(&self, index: usize) {
        let mut claim = Claim { deferred: self, index, copied: Err(panicked()) };
        claim.copied = self.copy_pages(self.grains[index]);
    }

    fn copy_pages(&self, grain: PageRun) -> Result<(), MigrationError> {
        let ends_before = |piece: &Piece| (piece.run.block, piece.run.end()) <= (grain.block, grain.first);
        let from = self.pieces.partition_point(ends_before);
        for piece in &self.pieces[from..] {
            if piece.run.block != grain.block || piece.run.first >= grain.end() {
                break;
            }
            let first = piece.run.first.max(grain.first);
            let length = bytes(piece.run.end().min(grain.end()) - first);
            let content = self.ram.block(grain.block).slice(bytes(first), length as usize)?;
            let place = self.arena.slice(bytes(piece.at + first - piece.run.first), length as usize)?;
            content.copy_to_window(&place)?;
        }
        Ok(())
    }

    fn release(&self, run: PageRun) {
        if let Err(error) = self.protection.release(run.block, run.first, run.count) {
            self.lose(&error);
        }
    }

    /// Call it when the kernel refuses to unblock a writer. Lifts the protection of all pages.
    ///
    /// The content of pages that were not copied is lost, because the running guest is more important than the
    /// checkpoint.
    pub(super) fn lose(&self, error: &WriteProtectionError) {
        self.is_lost.store(true, Ordering::SeqCst);
        self.error.lock().get_or_insert_with(|| MigrationError::System(error.to_string(), None));
        self.protection.lift();
    }

    fn why(&self) -> MigrationError {
        self.error.lock().clone().unwrap_or_else(panicked)
    }
}

/// A grain that this thread copies. Dropping it ends the copy, so that other threads do not wait without end.
struct Claim<'a> {
    deferred: &'a Deferred,
    index: usize,
    copied: Result<(), MigrationError>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Deferred { states, is_lost, error, grains, left, pins, .. } = self.deferred;
        let copied = std::mem::replace(&mut self.copied, Ok(()));
        if let Err(why) = &copied {
            error.lock().get_or_insert_with(|| why.clone());
        }
        // If the protection was lifted, the copied content may be newer than the checkpoint.
        let is_copied = copied.is_ok() && !is_lost.load(Ordering::SeqCst);
        self.deferred.release(grains[self.index]);
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            pins.lock().clear();
        }
        // This is the last step: a thread that reads the state may protect the same pages for the next
        // checkpoint.
        states[self.index].store(if is_copied { COPIED } else { FAILED }, Ordering::Release);
    }
}

fn panicked() -> MigrationError {
    MigrationError::Internal("a thread that copied pages of a checkpoint panicked".to_owned())
}
