//! On which way a page came, where lanes bring pages besides the channels of requested ones (specs/extension.md §12.5). Pure.

use std::sync::atomic::{AtomicBool, Ordering};

use sterna_ram::{DirtyBitmaps, GuestRam};

/// How a page comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// On the main or the preempt channel.
    Main,
    /// On a lane.
    Lane,
}

/// What came on each way.
pub(super) struct Ways {
    main: DirtyBitmaps,
    lanes: DirtyBitmaps,
    /// Lanes were lost, and none takes their place.
    are_over: AtomicBool,
}

impl Ways {
    pub(super) fn new(ram: &GuestRam) -> Self {
        Self { main: DirtyBitmaps::new(ram), lanes: DirtyBitmaps::new(ram), are_over: AtomicBool::new(false) }
    }

    /// Lanes bring nothing from now on, so no page comes on two ways any more.
    pub(super) fn end(&self) {
        self.are_over.store(true, Ordering::Release);
    }

    pub(super) fn are_over(&self) -> bool {
        self.are_over.load(Ordering::Acquire)
    }

    /// A page comes. True: for the first time on this way.
    pub(super) fn is_first(&self, way: Way, block: usize, page: u64) -> bool {
        let came = match way {
            Way::Main => &self.main,
            Way::Lane => &self.lanes,
        };
        !came.block(block).set(page)
    }
}
