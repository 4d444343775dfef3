//! Dirty sources: they report which pages of guest RAM were written.
//!
//! # The model
//! Tracking a page has two steps. A *sync* ([`DirtySource::sync`]) reports that the page was written.
//! *Re-arming* makes the source report the next write. Some sources do both in one step (userfaultfd, KVM
//! without manual protection). The others (KVM with manual protection, the software log) report a page at every
//! sync until it is re-armed. This order is correct for all of them: sync, re-arm, then read the page. A later
//! sync reports a write after the re-arming; the read sees a write before it.
//!
//! Two rules for users of a source follow:
//! - Re-arm only bits that a sync reported. Re-arming another bit loses a write.
//! - A page that is not re-armed yet may be reported again. In a sync while a round is still being sent, drop
//!   reports of pages that are still set in that round *after* the sync. These pages will be re-armed and read
//!   later, and the source reports writes after that. Do not drop reports of pages that will be sent without
//!   being read, such as absent ones.
//!
//! [`DirtySource::initially_set`] sources report every page until it was re-armed once. The first round must
//! then re-arm all pages, also absent ones, before it looks for absent pages.
//!
//! A write that one source does not see needs another source. For example, KVM does not see the writes of a
//! vhost device, which has a separate log ([`VhostLog`]). [`Combined`] joins several sources.
//!
//! A VMM that reads KVM's log itself, or has another log, supplies its results through an [`ExternalLog`].

#[cfg(feature = "vm-memory")]
mod atomic_bitmap;
mod bitmaps;
mod combined;
mod external;
mod kvm;
mod replaceable;
mod ring;
mod software;
mod sync_report;
mod uffd;
mod vhost;

#[cfg(feature = "vm-memory")]
pub use atomic_bitmap::AtomicBitmapLog;
pub use bitmaps::DirtyBitmaps;
pub use combined::Combined;
pub use external::{ExternalLog, FoundPages, VmmLog};
pub use kvm::{KvmDirtyLog, KvmLogMode, KvmSlot};
pub use replaceable::Replaceable;
pub use ring::{KvmDirtyRing, KvmDirtyRings};
pub use software::SoftwareLog;
pub use sync_report::{SyncReport, SyncTimes};
pub use uffd::UffdDirtyLog;
#[cfg(loom)]
pub use vhost::{LogWord, drain_words};
pub use vhost::{LoggedRange, VhostLog};

use crate::bitmap::PageBitmap;
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
fn check_bitmaps(origin: &'static str, ram: &GuestRam, bitmaps: &DirtyBitmaps) -> Result<(), DirtyError> {
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
fn check_rearm(
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
