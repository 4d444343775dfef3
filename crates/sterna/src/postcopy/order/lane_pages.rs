//! The background's pages for lanes. Lanes take pages without a lock, so that a request does not wait for a
//! lane.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::pages::{CHUNK_PAGES, Pages};
use crate::order::PageRun;

/// Most chunks around recent requests that wait for their turn.
const NEIGHBOURHOODS: usize = 16;

/// The pages that the destination lacks. A lane takes one chunk after the other: first the chunks around recent
/// requests, then the next free chunk.
pub(crate) struct LanePages {
    blocks: Arc<[Pages]>,
    /// For each block: the number of pages in a chunk, and the number of its first chunk over all blocks.
    chunks: Vec<(u64, u64)>,
    count: u64,
    next: AtomicU64,
    /// Chunks around recent requests, each as its number plus one. 0: the slot is empty.
    near: [AtomicU64; NEIGHBOURHOODS],
    near_next: AtomicUsize,
}

/// A lane's position: the pages of its chunk that it has not taken yet.
#[derive(Default)]
pub(crate) struct LanePlace {
    block: usize,
    pages: Range<u64>,
}

impl LanePages {
    /// `units`: for each block, the smallest number of pages that are taken together.
    pub(super) fn new(blocks: Arc<[Pages]>, units: &[u64]) -> Self {
        debug_assert!(blocks.len() == units.len());
        let (mut chunks, mut count) = (Vec::new(), 0);
        for (block, unit) in blocks.iter().zip(units) {
            let pages = CHUNK_PAGES.max(*unit);
            chunks.push((pages, count));
            count += block.unsent.pages().div_ceil(pages);
        }
        let near = std::array::from_fn(|_| AtomicU64::new(0));
        Self { blocks, chunks, count, next: AtomicU64::new(0), near, near_next: AtomicUsize::new(0) }
    }

    /// Takes up to `most` neighbouring pages. Each page is given to one lane. `None`: no page is left.
    pub(crate) fn take(&self, place: &mut LanePlace, most: u64) -> Option<PageRun> {
        loop {
            let unsent = self.blocks.get(place.block).map(|block| &block.unsent)?;
            if let Some(run) = unsent.take_run(place.pages.start, place.pages.end, most) {
                place.pages.start = run.end();
                return Some(PageRun { block: place.block, first: run.first, count: run.count });
            }
            *place = self.place(self.take_near().or_else(|| self.take_next())?);
        }
    }

    /// Number of pages that were not taken yet.
    pub(crate) fn left(&self) -> u64 {
        self.blocks.iter().map(|pages| pages.unsent.count()).sum()
    }

    /// Notes the chunk of a request, because a guest often touches neighbouring pages next. If there are too
    /// many, the oldest chunk is overwritten and waits for its ordinary turn.
    pub(super) fn note_near(&self, run: PageRun) {
        let (pages, first) = self.chunks[run.block];
        let near = first + run.first / pages + 1;
        if self.near.iter().all(|slot| slot.load(Ordering::Relaxed) != near) {
            let at = self.near_next.fetch_add(1, Ordering::Relaxed) % NEIGHBOURHOODS;
            self.near[at].store(near, Ordering::Relaxed);
        }
    }

    /// Takes the oldest noted chunk.
    fn take_near(&self) -> Option<u64> {
        let oldest = self.near_next.load(Ordering::Relaxed);
        (0..NEIGHBOURHOODS).find_map(|age| {
            let slot = &self.near[(oldest + age) % NEIGHBOURHOODS];
            // Loaded first because a swap is expensive: most slots are empty, and all lanes share them.
            let is_set = slot.load(Ordering::Relaxed) != 0;
            is_set.then(|| slot.swap(0, Ordering::Relaxed)).filter(|near| *near != 0).map(|near| near - 1)
        })
    }

    fn take_next(&self) -> Option<u64> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        (next < self.count).then_some(next)
    }

    fn place(&self, chunk: u64) -> LanePlace {
        // A block without pages has no chunk. If several blocks have the same first chunk, the last one owns
        // it.
        let block = self.chunks.partition_point(|(_, first)| *first <= chunk) - 1;
        let (pages, first) = self.chunks[block];
        let start = (chunk - first) * pages;
        LanePlace { block, pages: start..start + pages }
    }
}
