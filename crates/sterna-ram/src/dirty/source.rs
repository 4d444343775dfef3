//! What every dirty source does, and the checks of its arguments.

use crate::bitmap::PageBitmap;
use crate::dirty::bitmaps::DirtyBitmaps;
use crate::dirty::sync_report::SyncReport;
use crate::error::{DirtyError, RamError};
use crate::guest::GuestRam;

/// Reports which pages of a guest's RAM were written. See the module for the model.
pub trait DirtySource: Send + Sync {
    /// Starts tracking: every write from now on is reported.
    ///
    /// # Errors
    /// The kernel refused; no write is tracked then.
    fn start(&self) -> Result<(), DirtyError>;

    /// Ends tracking and restores the state from before [`DirtySource::start`]. Repeated calls have no effect.
    ///
    /// # Errors
    /// The kernel refused a part; all other parts were undone.
    fn stop(&self) -> Result<(), DirtyError>;

    /// Sets the bits of the pages that were written since they were last re-armed.
    ///
    /// # Errors
    /// The source is not started, the bitmaps do not belong to its RAM, or the kernel refused. Pages that were
    /// found before the failure are in the bitmaps, possibly only there.
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError>;

    /// Re-arms the pages of `[first, first + count)` whose bit is set in `synced`.
    ///
    /// `synced` covers the whole block and contains the pages that syncs have reported. The caller reads the
    /// pages afterwards, so earlier writes to them need not be reported. A source may re-arm another page of
    /// the range only if it reports that page's write in the next sync. Otherwise the write would be lost.
    /// Sources that re-arm during the sync may do nothing.
    ///
    /// `first` is a multiple of 64. `count` is one, too, unless the range ends with the block. Several threads
    /// may call this in parallel for disjoint ranges.
    ///
    /// # Errors
    /// The source is not started, the range or the bitmap does not match the block, or the kernel refused.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError>;

    /// Whether every page is reported after `start` until it was re-armed once (KVM's "initially set").
    ///
    /// The result is valid after the source was started.
    fn initially_set(&self) -> bool {
        false
    }

    /// Marks pages that are known to be zero in `absent`, without reading them.
    ///
    /// The range is `[first, first + count)` in block `block` of `ram`. By default, the pages are those that
    /// were never populated. A source with better information overrides the method.
    ///
    /// # Errors
    /// The errors of [`crate::RamBlock::mark_absent`].
    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        ram.block(block).mark_absent(first, count, absent)
    }

    /// Returns a short name for statistics and errors.
    fn name(&self) -> &'static str;
}

/// Refuses bitmaps that do not belong to `ram`.
pub(super) fn check_bitmaps(
    origin: &'static str,
    ram: &GuestRam,
    bitmaps: &DirtyBitmaps,
) -> Result<(), DirtyError> {
    let same = |block: usize| {
        bitmaps.blocks().get(block).map(PageBitmap::pages) == ram.blocks().get(block).map(|b| b.pages())
    };
    let blocks = ram.blocks().len().max(bitmaps.blocks().len());
    match (0..blocks).find(|block| !same(*block)) {
        None => Ok(()),
        Some(block) => Err(DirtyError::Range {
            origin,
            block,
            rule: "the bitmaps belong to other RAM than the tracked RAM",
        }),
    }
}

/// Refuses a range that a source cannot re-arm. `pages` is the block's size, `None` if the block does not exist.
pub(super) fn check_rearm(
    origin: &'static str,
    block: usize,
    pages: Option<u64>,
    first: u64,
    count: u64,
    synced: &PageBitmap,
) -> Result<(), DirtyError> {
    let refuse = |rule| Err(DirtyError::Range { origin, block, rule });
    let Some(pages) = pages else { return refuse("the block does not exist") };
    let end = first.checked_add(count).filter(|end| *end <= pages);
    let Some(end) = end else { return refuse("the range ends after the block") };
    if synced.pages() != pages {
        return refuse("the bitmap does not belong to the block");
    }
    if !first.is_multiple_of(64) || !(count.is_multiple_of(64) || end == pages) {
        return refuse("the range does not consist of whole words of 64 pages");
    }
    Ok(())
}
