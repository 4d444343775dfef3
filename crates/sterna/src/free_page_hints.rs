//! A guest says which of its pages it does not use. In the first round these are not sent.
//!
//! A hint is about a page's content at that moment: nobody needs it. If the guest writes the page later, the dirty source
//! reports that, and the page is sent in a later round. For that, the engine asks the guest only when writes to all pages are
//! reported: when dirty tracking has begun and every page was re-armed once.
//!
//! Hints count in the first round only, since nothing of a page may have been sent before: only then it reads as zero at the
//! destination. A hint for a page that a lane has claimed already changes nothing. The engine closes [`FreePages`] before it asks
//! the dirty source for the first time.
//!
//! Lanes wait a moment for hints: a lane that sends a page before its hint comes has sent it in vain. They begin when the guest has
//! named everything, after a second at the latest. So asking delays a migration, and lengthens no
//! downtime.
//!
//! Hints are not used for a guest that is paused; with `postcopy_ram`, where what was not sent would have to follow; or over RDMA, where
//! memory is registered ahead of the lanes.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// What asks the guest. Each method returns soon and does not wait for the guest.
pub trait FreePageHints: Send + Sync {
    /// The first round is about to begin, and every write from now on is reported: asks the guest which pages it does not use. They go to
    /// `free`, from any thread; [`FreePages::complete`] follows the last one.
    fn begin(&self, free: FreePages);

    /// Hints are of no use any more. The guest should give none, and may not expect yet to find what was in the pages.
    fn stop(&self);

    /// The migration has ended here: the content of hinted pages does not change any more on this side, so the guest may have
    /// them back. After a migration that has completed, the guest at the destination gets them back when it starts there, by
    /// what its device's state says.
    fn end(&self);
}

/// Block, first page and number of pages.
type Take = Box<dyn Fn(usize, u64, u64) + Send>;

/// Takes hints, as long as they are of use.
#[derive(Clone)]
pub struct FreePages(Arc<Mutex<Taken>>);

struct Taken {
    /// `None`: hints come too late.
    take: Option<Take>,
    is_complete: bool,
}

impl FreePages {
    /// Hints go to `take`, as [`FreePages::hint`] gets them. The engine makes its own; a VMM needs this in tests only.
    pub fn new(take: impl Fn(usize, u64, u64) + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Taken { take: Some(Box::new(take)), is_complete: false })))
    }

    /// The guest does not use `count` pages from page `first` of block `block` on, by the block's index in
    /// [`GuestRam`](crate::ram::GuestRam). Pages that are not there are ignored. False: it comes too late and changes nothing.
    pub fn hint(&self, block: usize, first: u64, count: u64) -> bool {
        // Locked while the hint is noted: after `close` no page becomes free.
        let taken = self.0.lock();
        if let Some(take) = &taken.take {
            take(block, first, count);
        }
        taken.take.is_some()
    }

    /// The guest has named all that it does not use: lanes need not wait for more.
    pub fn complete(&self) {
        self.0.lock().is_complete = true;
    }

    /// Whether the guest has named all.
    pub fn is_complete(&self) -> bool {
        self.0.lock().is_complete
    }

    /// No hint counts from now on.
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
