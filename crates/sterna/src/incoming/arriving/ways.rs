//! Records by which path each page arrived, if lanes carry pages besides the main and preempt channels
//! (specs/extension.md §12.5). Pure.

use std::sync::atomic::{AtomicBool, Ordering};

use sterna_ram::{DirtyBitmaps, GuestRam};

/// The path by which a page arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The main channel or the preempt channel.
    Main,
    /// A multifd channel that carries pages in postcopy.
    Lane,
}

/// Bitmaps of the pages that arrived on each path.
pub(super) struct Ways {
    main: DirtyBitmaps,
    lanes: DirtyBitmaps,
    /// The lanes were lost and are not replaced.
    are_over: AtomicBool,
}

impl Ways {
    pub(super) fn new(ram: &GuestRam) -> Self {
        Self { main: DirtyBitmaps::new(ram), lanes: DirtyBitmaps::new(ram), are_over: AtomicBool::new(false) }
    }

    /// Lanes carry no pages from now on, so no page can arrive on two paths any more.
    pub(super) fn end(&self) {
        self.are_over.store(true, Ordering::Release);
    }

    pub(super) fn are_over(&self) -> bool {
        self.are_over.load(Ordering::Acquire)
    }

    /// Records a page. Returns true if it arrived for the first time on this path.
    pub(super) fn is_first(&self, way: Way, block: usize, page: u64) -> bool {
        let came = match way {
            Way::Main => &self.main,
            Way::Lane => &self.lanes,
        };
        !came.block(block).set(page)
    }
}
