//! Pages of a checkpoint that are protected, and copied while the guest goes on.
//!
//! Whoever needs a part first copies it: the thread that copies all in order, a lane that is to send it, or the thread that serves the
//! guest's writes. It is let through when it is copied. Each part is copied once; others wait for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_ram::write_protection::{WriteProtection, WriteProtectionError};
use sterna_ram::{GuestRam, PinnedRam, RamBlock};

use super::super::pieces::{Piece, bytes};
use super::spans::{grain_of, grains};
use crate::error::MigrationError;
use crate::order::PageRun;

/// Nobody has begun to copy the part.
const PENDING: u8 = 0;
const COPYING: u8 = 1;
const COPIED: u8 = 2;
/// It cannot be had any more.
const FAILED: u8 = 3;

/// Between two looks at a part that another thread copies: it takes some microseconds.
const LOOK: Duration = Duration::from_micros(20);

/// The pages of one checkpoint.
pub(in super::super) struct Deferred {
    ram: GuestRam,
    arena: RamBlock,
    pieces: Arc<[Piece]>,
    protection: Arc<WriteProtection>,
    grains: Vec<PageRun>,
    states: Vec<AtomicU8>,
    left: AtomicUsize,
    /// Pages are not protected any more that were not copied.
    is_lost: AtomicBool,
    error: Mutex<Option<MigrationError>>,
    /// Nothing is given back to the kernel meanwhile: the content would be lost without a write.
    pins: Mutex<Vec<PinnedRam>>,
}

impl Deferred {
    /// Of what is in these spans, which are about to be protected.
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

    /// Sees to it that these pages are copied: copies them, or waits for whoever does.
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

    /// Copies all that is left, in order, and waits for what others copy.
    ///
    /// # Errors
    /// The first; the others are let through all the same.
    pub(super) fn finish_all(&self) -> Result<(), MigrationError> {
        let mut done = Ok(());
        for index in 0..self.grains.len() {
            let finished = self.finish(index);
            done = done.and(finished);
        }
        done
    }

    /// Lets a writer of this page through when it is copied. Does not wait for others.
    pub(super) fn let_through(&self, block: usize, page: u64) {
        let state = grain_of(&self.grains, block, page).map(|index| (index, self.claim(index)));
        match state {
            Some((index, Ok(()))) => self.copy(index),
            // Whoever copies it lets all of it through afterwards.
            Some((_, Err(COPYING))) => {}
            // Let through before its protection was whole, or not of this checkpoint.
            _ => self.release(PageRun { block, first: page, count: 1 }),
        }
    }

    /// Whether all is copied, or cannot be had.
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

    /// Copies a part that this thread has claimed.
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

    /// The kernel does not let a writer through. Then all go on, and what was not copied is lost: the guest comes first.
    pub(super) fn lose(&self, error: &WriteProtectionError) {
        self.is_lost.store(true, Ordering::SeqCst);
        self.error.lock().get_or_insert_with(|| MigrationError::System(error.to_string()));
        self.protection.lift();
    }

    fn why(&self) -> MigrationError {
        self.error.lock().clone().unwrap_or_else(panicked)
    }
}

/// A part that this thread copies: whatever becomes of it, nobody waits for it afterwards.
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
        // Where the protection was lifted, what was copied may be newer.
        let is_copied = copied.is_ok() && !is_lost.load(Ordering::SeqCst);
        self.deferred.release(grains[self.index]);
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            pins.lock().clear();
        }
        // At the very end: whoever sees it may protect the same pages for the next checkpoint.
        states[self.index].store(if is_copied { COPIED } else { FAILED }, Ordering::Release);
    }
}

fn panicked() -> MigrationError {
    MigrationError::Internal("a thread that copied pages of a checkpoint panicked".to_owned())
}
