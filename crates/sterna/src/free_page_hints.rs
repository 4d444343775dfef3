//! Free page hints: the guest names unused pages, and the source does not send them in the first round.
//!
//! A hint says that a page's content at that moment is not needed. If the guest writes the page later, the dirty
//! source reports the write, and the page is sent in a later round. Therefore the engine asks the guest only when
//! writes to all pages are reported: after dirty tracking has begun and every page was re-armed once.
//!
//! Hints count in the first round only: a page reads as zero at the destination only if nothing was sent for it
//! before. A hint for a page that a lane has already claimed has no effect. The engine closes [`FreePages`] before
//! the first sync.
//!
//! Lanes wait briefly for hints, because a page that is sent before its hint is sent in vain. They begin when the
//! guest has named all unused pages, after one second at the latest. So hints delay a migration, but do not lengthen
//! the downtime.
//!
//! Hints are not used in three cases:
//! - The guest is paused.
//! - `postcopy_ram` is on, because each page that was not sent would have to follow.
//! - The migration uses RDMA, because memory is registered ahead of the lanes.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// Implemented by a VMM to ask the guest for hints. Each method returns quickly and does not wait for the guest.
pub trait FreePageHints: Send + Sync {
    /// Asks the guest which pages it does not use. The first round is about to begin, and every later write is
    /// reported.
    ///
    /// The VMM passes the hints to `free`, from any thread, and calls [`FreePages::complete`] after the last hint.
    fn begin(&self, free: FreePages);

    /// Hints have no effect from now on. The guest should send no more, and may not yet rely on the pages' content.
    fn stop(&self);

    /// The migration has ended on this side. The content of hinted pages no longer changes here, so the guest may use
    /// them again.
    ///
    /// After a completed migration, the guest at the destination gets its pages back when it starts there, as its
    /// device's state specifies.
    fn end(&self);
}

/// Block, first page and number of pages.
type Take = Box<dyn Fn(usize, u64, u64) + Send>;

/// Receives the hints of one migration, until the engine closes it.
#[derive(Clone)]
pub struct FreePages(Arc<Mutex<Taken>>);

struct Taken {
    /// `None` after [`FreePages::close`]: hints come too late.
    take: Option<Take>,
    is_complete: bool,
}

impl FreePages {
    /// Passes hints to `take`, with the arguments of [`FreePages::hint`]. The engine creates its own; a VMM needs
    /// this only in tests.
    pub fn new(take: impl Fn(usize, u64, u64) + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Taken { take: Some(Box::new(take)), is_complete: false })))
    }

    /// Reports that the guest does not use `count` pages of block `block`, from page `first` on. `block` is an index
    /// in [`GuestRam`](crate::ram::GuestRam). Pages outside the block are ignored. Returns false if the hint comes
    /// too late and has no effect.
    pub fn hint(&self, block: usize, first: u64, count: u64) -> bool {
        // Locked while the hint is noted, so that no page becomes free after `close`.
        let taken = self.0.lock();
        if let Some(take) = &taken.take {
            take(block, first, count);
        }
        taken.take.is_some()
    }

    /// The guest has named all its unused pages. Lanes stop waiting for more.
    pub fn complete(&self) {
        self.0.lock().is_complete = true;
    }

    /// Whether the guest has named all its unused pages.
    pub fn is_complete(&self) -> bool {
        self.0.lock().is_complete
    }

    /// Ignores all hints from now on.
    pub(crate) fn close(&self) {
        self.0.lock().take = None;
    }
}

impl fmt::Debug for FreePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let taken = self.0.lock();
        let mut shown = f.debug_struct("FreePages");
        shown.field("is_open", &taken.take.is_some()).field("is_complete", &taken.is_complete).finish()
    }
}
