//! The pages of a block that the destination lacks. Threads take them without a lock: the thread that clears a
//! page's bit owns the page.

use std::sync::OnceLock;

use sterna_ram::{PageBitmap, Run};

/// Pages that are read and sent together: 64 pages are 256 KiB.
pub const CHUNK_PAGES: u64 = 64;

pub(super) struct Pages {
    /// Pages that were not sent yet.
    pub(super) unsent: PageBitmap,
    /// Pages that are requested and were not sent yet.
    pub(super) requested: PageBitmap,
    /// With lanes: pages that were not sent as requested pages yet.
    askable: OnceLock<PageBitmap>,
}

impl Pages {
    /// Starts with `pages` pages, of which none was sent.
    pub(super) fn unsent(pages: u64) -> Self {
        let unsent = PageBitmap::new(pages);
        unsent.set_all();
        Self { unsent, requested: PageBitmap::new(pages), askable: OnceLock::new() }
    }

    /// Allows a page to be sent twice from now on: by a lane, and as a requested page.
    pub(super) fn share(&self) {
        self.askable.get_or_init(|| {
            let askable = PageBitmap::new(self.unsent.pages());
            add(&askable, &self.unsent);
            askable
        });
    }

    /// The pages that are sent if they are requested.
    pub(super) fn askable(&self, has_lanes: bool) -> &PageBitmap {
        self.askable.get().filter(|_| has_lanes).unwrap_or(&self.unsent)
    }

    /// Takes the first requested pages in `[first, end)`, at most `most`.
    pub(super) fn take_requested(&self, first: u64, end: u64, most: u64, has_lanes: bool) -> Option<Run> {
        let mut at = first;
        loop {
            // A page that was sent in the background counts as no longer requested.
            let run = self.requested.take_run(at, end, most)?;
            if let Some(taken) = self.askable(has_lanes).take_run(run.first, run.end(), most) {
                let left = run.end().saturating_sub(taken.end());
                self.requested.set_range(taken.end(), left);
                if has_lanes {
                    self.unsent.clear_range(taken.first, taken.count);
                }
                return Some(taken);
            }
            at = run.end();
        }
    }

    /// Takes the first unsent pages of a chunk.
    pub(super) fn take_in(&self, chunk: u64) -> Option<Run> {
        let first = chunk * CHUNK_PAGES;
        let run = self.unsent.take_run(first, first + CHUNK_PAGES, CHUNK_PAGES)?;
        self.requested.clear_range(run.first, run.count);
        Some(run)
    }
}

/// Sets the bits in `to` that are set in `from`. Both must have the same number of pages.
pub(super) fn add(to: &PageBitmap, from: &PageBitmap) {
    let mut at = 0;
    while let Some(run) = from.next_run(at, from.pages(), u64::MAX) {
        to.set_range(run.first, run.count);
        at = run.end();
    }
}
