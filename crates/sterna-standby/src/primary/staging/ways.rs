//! The two ways to stage pages: copy them in the pause, or protect them.
//!
//! Protected pages are copied after the guest resumed.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna::error::MigrationError;
use sterna_ram::{GuestRam, RamBlock};

use super::copy::copy_all;
use super::on_write::{CopyOnWrite, Costs, Deferred};
use super::pieces::{Piece, count};

/// How the dirty pages of a checkpoint are kept until they are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CheckpointCopy {
    /// The way with the shorter pause, according to measurements on this host.
    #[default]
    Auto,
    /// Pages are copied while the guest is paused.
    Copy,
    /// Pages are write-protected while the guest is paused, and copied after it resumed.
    ///
    /// A vCPU that writes a page before it is copied blocks until then. Where the host or the guest's memory does
    /// not allow write protection, pages are copied as with [`CheckpointCopy::Copy`].
    CopyOnWrite,
}

/// Counts of how the pages of checkpoints were kept.
#[derive(Debug, Clone, Default)]
pub(crate) struct CopyCounts {
    /// Checkpoints with pages that were copied after the guest resumed.
    pub on_write: u64,
    /// Guest writes that blocked until the page was copied.
    pub held_writes: u64,
    /// Pages that were copied before the pause, and not written afterwards.
    pub ahead_pages: u64,
    /// Why pages are copied during the pause although the setting asks for copy-on-write.
    pub why_copied: Option<String>,
}

/// Copies pages to their places, in one of the two ways.
pub(super) struct Ways {
    ram: GuestRam,
    arena: RamBlock,
    set: Mutex<CheckpointCopy>,
    on_write: Mutex<Option<Arc<CopyOnWrite>>>,
    costs: Mutex<Costs>,
    counts: Mutex<CopyCounts>,
}

impl Ways {
    pub(super) fn new(ram: &GuestRam, arena: &RamBlock) -> Self {
        Self {
            ram: ram.clone(),
            arena: arena.clone(),
            set: Mutex::new(CheckpointCopy::Copy),
            on_write: Mutex::default(),
            costs: Mutex::default(),
            counts: Mutex::default(),
        }
    }

    pub(super) fn set(&self, way: CheckpointCopy) {
        *self.set.lock() = way;
    }

    pub(super) fn counts(&self) -> CopyCounts {
        self.counts.lock().clone()
    }

    /// Copies pages to their places while the guest runs.
    pub(super) fn copy_ahead(&self, pieces: &[Piece]) -> Result<(), MigrationError> {
        copy_all((&self.ram, &self.arena), pieces)
    }

    /// Counts pages that were copied ahead and became part of the checkpoint.
    pub(super) fn stayed(&self, pages: u64) {
        self.counts.lock().ahead_pages += pages;
    }

    /// Prepares before the guest is paused. Gives, only the first time, why pages are copied during the pause.
    pub(super) fn prepare(&self, holds_writes: bool) -> Option<String> {
        self.settle();
        if *self.set.lock() == CheckpointCopy::Copy {
            self.end();
            self.counts.lock().why_copied = None;
            return None;
        }
        let now = self.on_write.lock().clone();
        let trouble = match now {
            Some(on_write) => on_write.broken().map(|why| why.to_string()),
            // An earlier attempt to begin copy-on-write failed.
            None if self.counts.lock().why_copied.is_some() => return None,
            None => None,
        };
        let trouble = trouble.or_else(|| (!holds_writes).then(|| EXTERNAL.to_owned()));
        let why = match trouble {
            Some(why) => {
                self.end();
                why
            }
            None if self.on_write.lock().is_some() => return None,
            None => match CopyOnWrite::begin(&self.ram) {
                Ok(on_write) => {
                    let refused = on_write.refused();
                    *self.on_write.lock() = Some(Arc::new(on_write));
                    if refused.is_empty() {
                        return None;
                    }
                    refused.join("; ")
                }
                Err(error) => error.to_string(),
            },
        };
        let known = self.counts.lock().why_copied.replace(why.clone());
        (known.as_ref() != Some(&why))
            .then(|| format!("pages of checkpoints are copied while the guest stands: {why}"))
    }

    /// Copies all pages to their places, or protects them and copies them later.
    pub(super) fn bring(&self, pieces: &Arc<[Piece]>) -> Result<Option<Arc<Deferred>>, MigrationError> {
        let places = (&self.ram, &self.arena);
        if let Some(deferred) = self.defer(pieces)? {
            return Ok(Some(deferred));
        }
        let began = Instant::now();
        copy_all(places, pieces)?;
        self.costs.lock().copied(count(&**pieces), began.elapsed());
        Ok(None)
    }

    fn defer(&self, pieces: &Arc<[Piece]>) -> Result<Option<Arc<Deferred>>, MigrationError> {
        let (set, costs) = (*self.set.lock(), *self.costs.lock());
        let on_write = self.on_write.lock().clone().filter(|on_write| on_write.broken().is_none());
        let Some(on_write) = on_write.filter(|_| set != CheckpointCopy::Copy) else { return Ok(None) };
        let (spans, runs) = on_write.spans(pieces, costs.gap());
        let is_covered = |piece: &&Piece| on_write.covers(piece.run.block);
        let is_better = match set {
            CheckpointCopy::CopyOnWrite => true,
            _ => costs.prefer_protecting(count(pieces.iter().filter(is_covered)), runs),
        };
        if spans.is_empty() || !is_better {
            return Ok(None);
        }
        let places = (&self.ram, &self.arena);
        let began = Instant::now();
        let deferred = on_write.defer(places, Arc::clone(pieces), &spans)?;
        self.costs.lock().protected(runs, began.elapsed());
        let others: Vec<_> = pieces.iter().filter(|piece| !is_covered(piece)).copied().collect();
        copy_all(places, &others)?;
        let mut counts = self.counts.lock();
        counts.on_write += 1;
        counts.held_writes = on_write.held();
        Ok(Some(deferred))
    }

    pub(super) fn go_on(&self) {
        if let Some(on_write) = &*self.on_write.lock() {
            on_write.go_on();
        }
    }

    /// Copies all remaining pages of the last checkpoint.
    pub(super) fn settle(&self) {
        let on_write = self.on_write.lock().clone();
        if let Some(on_write) = on_write {
            on_write.settle();
            self.counts.lock().held_writes = on_write.held();
        }
    }

    /// Copies all remaining pages, and ends copy-on-write: no write blocks any more.
    pub(super) fn end(&self) {
        self.settle();
        // The last owner drops it. No thread keeps a reference for long.
        let on_write = self.on_write.lock().take();
        drop(on_write);
    }
}

const EXTERNAL: &str = "this VM does not say that all writes to its guest's memory can be held: other processes or devices \
                        (vhost-user, vfio-user, VFIO) may write it";
