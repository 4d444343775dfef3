//! Who wrote which page.
//!
//! # The model
//! Tracking a page has two steps. A *sync* ([`DirtySource::sync`]) reports that it was written;
//! *re-arming* makes the source report the next write. Some sources do both at once (userfaultfd, KVM
//! without manual protection); the others (KVM with manual protection, the software log) report a page
//! at every sync until it is re-armed. This order is correct for all of them: sync, re-arm, then read
//! the page. A later sync reports a write after the re-arming; the read sees a write before it.
//!
//! Two rules for users of a source follow:
//! - Re-arm only bits that a sync reported. Re-arming another one loses a write.
//! - A page that is not re-armed yet may be reported again. In a sync while a round is still being
//!   sent, drop reports of pages that are still set in that round *after* the sync: they will be
//!   re-armed and read later, and the source reports writes after that. Do not drop reports of pages
//!   that will be sent without being read, such as absent ones.
//!
//! [`DirtySource::initially_set`] sources report every page until it was re-armed once: the first round
//! must then re-arm all pages, absent ones too, before it asks which are absent.
//!
//! A writer that one source does not see needs another source: KVM does not see what a vhost device writes,
//! which has its own log ([`VhostLog`]). [`Combined`] joins several sources.
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

use crate::{DirtyError, GuestRam, PageBitmap, RamError};

/// Reports which pages were written.
pub trait DirtySource: Send + Sync {
    /// Begins tracking: every write from now on is reported.
    ///
    /// # Errors
    /// The kernel refused; nothing is tracked then.
    fn start(&self) -> Result<(), DirtyError>;

    /// Ends tracking and leaves everything as it was before [`DirtySource::start`]. Idempotent.
    ///
    /// # Errors
    /// The kernel refused; what could be undone was undone.
    fn stop(&self) -> Result<(), DirtyError>;

    /// Syncs: sets the bits of the pages that were written since they were last re-armed.
    ///
    /// # Errors
    /// The source is not started, the bitmaps do not belong to its RAM, or the kernel refused. What was
    /// found before the failure is in the bitmaps, and may be nowhere else.
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError>;

    /// Re-arms those pages of `[first, first + count)` whose bit is set in `synced`, what syncs have reported
    /// (a bitmap over the whole block): they are about to be read, so writes to them until now need not be
    /// reported. Another page of the range may be re-armed only by a source that reports its write in the next
    /// sync: else the write is lost. Sources that re-arm during the sync may do nothing. `first` is a multiple of 64;
    /// `count` too, unless the range ends with the block. May be called from several threads for disjoint ranges.
    ///
    /// # Errors
    /// The source is not started, the range or bitmap does not fit, or the kernel refused.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError>;

    /// Whether every page is reported after `start` until it was re-armed once (KVM's "initially set").
    /// Known once the source was started.
    fn initially_set(&self) -> bool {
        false
    }

    /// Marks pages of `[first, first + count)` in block `block` of `ram` that are known to be zero without
    /// being read: those that were never populated, unless the source has better information.
    ///
    /// # Errors
    /// As [`crate::RamBlock::mark_absent`].
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

    /// A short name for statistics and errors.
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
        Some(block) => {
            Err(DirtyError::Range { origin, block, rule: "the bitmaps are not those of the tracked RAM" })
        }
    }
}

/// Refuses a range that a source cannot re-arm. `pages` is the block's size, `None` if there is no such block.
fn check_rearm(
    origin: &'static str,
    block: usize,
    pages: Option<u64>,
    first: u64,
    count: u64,
    synced: &PageBitmap,
) -> Result<(), DirtyError> {
    let refuse = |rule| Err(DirtyError::Range { origin, block, rule });
    let Some(pages) = pages else { return refuse("there is no such block") };
    let end = first.checked_add(count).filter(|end| *end <= pages);
    let Some(end) = end else { return refuse("the range ends after the block") };
    if synced.pages() != pages {
        return refuse("the bitmap does not belong to the block");
    }
    if !first.is_multiple_of(64) || !(count.is_multiple_of(64) || end == pages) {
        return refuse("the range is not made of whole words of 64 pages");
    }
    Ok(())
}
