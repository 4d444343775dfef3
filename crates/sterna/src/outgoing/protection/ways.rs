//! The two ways of pages into the staging memory: copied while the guest stands, or protected then and copied when it goes on.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_ram::{GuestRam, RamBlock};

use super::copy::copy_all;
use super::on_write::{CopyOnWrite, Costs, Deferred};
use super::pieces::{Piece, count};
use crate::error::MigrationError;

/// How the dirty pages of a checkpoint are kept for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CheckpointCopy {
    /// The way in which the guest stands for a shorter time, by what both took on this host before.
    #[default]
    Auto,
    /// They are copied while the guest stands.
    Copy,
    /// They are write-protected while the guest stands, and copied when it goes on; who writes one first waits for its copy. Where this
    /// host or the guest's memory does not allow it they are copied.
    CopyOnWrite,
}

/// How pages of checkpoints were kept.
#[derive(Debug, Clone, Default)]
pub(crate) struct CopyCounts {
    /// Checkpoints with pages that were copied when the guest went on.
    pub(crate) on_write: u64,
    /// Writes that were held until the page was copied.
    pub(crate) held_writes: u64,
    /// Pages that were copied before the guest stood, and not written since.
    pub(crate) ahead_pages: u64,
    /// Why pages are copied while the guest stands though they need not be, by the setting.
    pub(crate) why_copied: Option<String>,
}

/// Brings pages to their places.
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

    /// Copies pages while the guest runs.
    pub(super) fn copy_ahead(&self, pieces: &[Piece]) -> Result<(), MigrationError> {
        copy_all((&self.ram, &self.arena), pieces)
    }

    /// So many pages that were copied ahead are those of the checkpoint.
    pub(super) fn stayed(&self, pages: u64) {
        self.counts.lock().ahead_pages += pages;
    }

    /// Before the guest stands. Gives why pages are copied all the same, the first time.
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
            // It was not to be had.
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

    /// Brings all pages to their places, or sees to it that they come there while the guest goes on.
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

    /// What is left is copied.
    pub(super) fn settle(&self) {
        let on_write = self.on_write.lock().clone();
        if let Some(on_write) = on_write {
            on_write.settle();
            self.counts.lock().held_writes = on_write.held();
        }
    }

    /// The same, and no write is held any more.
    pub(super) fn end(&self) {
        self.settle();
        // Whoever has it last drops it; nobody keeps it for long.
        let on_write = self.on_write.lock().take();
        drop(on_write);
    }
}

const EXTERNAL: &str = "this VM does not say that all writes to its guest's memory can be held: other processes or devices \
                        (vhost-user, vfio-user, VFIO) may write it";
