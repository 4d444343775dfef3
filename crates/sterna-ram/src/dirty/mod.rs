//! Who wrote which page.
//!
//! # The model
//! Tracking a page has two moments. *Harvesting* learns that it was written; *re-arming* makes the next
//! write be noticed again. Some sources do both at once (userfaultfd, KVM without manual protection);
//! the others (KVM with manual protection, the software log) go on reporting a page until it is
//! re-armed. The order that is right for all of them: harvest the bit, re-arm, then read the page. A
//! write after the re-arming is reported by a later harvest; a write before it is seen by the read.
//!
//! Two consequences for whoever uses a source:
//! - Only bits that were harvested may be re-armed. Clearing another one loses a write.
//! - A page that still waits to be re-armed may be reported again. When harvesting while a pass is
//!   still being sent, drop reports of pages that are still set in that pass *after* the harvest: they
//!   will be re-armed and read later anyway, and a source that reports until re-armed will not forget
//!   a write that comes after that. Not so pages that will be sent without being read, such as absent ones.
//!
//! [`DirtySource::initially_set`] sources report every page until it was re-armed once: the first pass
//! must then re-arm all pages, absent ones too, before it asks which are absent.
//!
//! Who writes behind one source's back needs another: KVM does not see what a vhost device writes, which
//! has a log of its own ([`VhostLog`]). [`Combined`] makes several sources one.
//!
//! A VMM that reads KVM's log itself, or has another log of its own, hands over what it found through an [`ExternalLog`].

#[cfg(feature = "vm-memory")]
mod atomic_bitmap;
mod bitmaps;
mod combined;
mod external;
mod harvest;
mod kvm;
mod replaceable;
mod ring;
mod software;
mod uffd;
mod vhost;

#[cfg(feature = "vm-memory")]
pub use atomic_bitmap::AtomicBitmapLog;
pub use bitmaps::DirtyBitmaps;
pub use combined::Combined;
pub use external::{ExternalLog, FoundPages, VmmLog};
pub use harvest::{Harvest, SyncTimes};
pub use kvm::{KvmDirtyLog, KvmLogMode, KvmSlot};
pub use replaceable::Replaceable;
pub use ring::{KvmDirtyRing, KvmDirtyRings};
pub use software::SoftwareLog;
pub use uffd::UffdDirtyLog;
#[cfg(loom)]
pub use vhost::{LogWord, drain_words};
pub use vhost::{LoggedRange, VhostLog};

use crate::{DirtyError, GuestRam, PageBitmap, RamError};

/// Tells which pages were written.
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

    /// ORs in the pages that were written since they were last re-armed.
    ///
    /// # Errors
    /// The source is not started, the bitmaps are not those of its RAM, or the kernel refused. What was
    /// found before the failure is in the bitmaps, and maybe nowhere else.
    fn harvest(&self, into: &mut DirtyBitmaps) -> Result<Harvest, DirtyError>;

    /// Arms tracking again for those pages of `[first, first + count)` whose bit is set in `harvested`
    /// (a bitmap over the whole block): they are about to be read, so writes to them until now need not be
    /// reported. Another page of the range may be armed again only by a source that reports its write in the next
    /// harvest: else the write is lost. Sources that re-arm while harvesting may do nothing. `first` is a multiple of 64; `count` too, unless the range
    /// ends with the block. May be called from several threads for disjoint ranges.
    ///
    /// # Errors
    /// The source is not started, the range or bitmap does not fit, or the kernel refused.
    fn rearm(&self, block: usize, first: u64, count: u64, harvested: &PageBitmap) -> Result<(), DirtyError>;

    /// Whether every page is reported after `start` until it was re-armed once (KVM's "initially set").
    /// Known once the source was started.
    fn initially_set(&self) -> bool {
        false
    }

    /// Marks pages of `[first, first + count)` in block `block` of `ram` that are known to be zero without
    /// anybody reading them: those that were never populated, unless the source knows better.
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

/// Refuses bitmaps that are not those of `ram`.
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
    harvested: &PageBitmap,
) -> Result<(), DirtyError> {
    let refuse = |rule| Err(DirtyError::Range { origin, block, rule });
    let Some(pages) = pages else { return refuse("there is no such block") };
    let end = first.checked_add(count).filter(|end| *end <= pages);
    let Some(end) = end else { return refuse("the range ends after the block") };
    if harvested.pages() != pages {
        return refuse("the bitmap does not belong to the block");
    }
    if !first.is_multiple_of(64) || !(count.is_multiple_of(64) || end == pages) {
        return refuse("the range is not made of whole words of 64 pages");
    }
    Ok(())
}
