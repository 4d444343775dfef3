//! Decides the order of pages: requested pages first, in the order of the requests, then the others in
//! ascending order. Among the others, neighbours of recent requests precede.
//!
//! Pure: no I/O and no clock. The memory is bounded, whatever the peer requests.

mod lane_pages;
mod pages;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_ram::PageBitmap;
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use crate::error::BadRequest;
use crate::order::PageRun;
pub(crate) use lane_pages::{LanePages, LanePlace};
pub use pages::CHUNK_PAGES;
use pages::Pages;

/// Most requests whose order is remembered. Beyond them only the pages are known, and are sent in ascending
/// order.
const QUEUE: usize = 1024;
/// Most chunks around recent requests that wait for their turn.
const NEIGHBOURHOODS: usize = 16;

/// The pages that the destination lacks, and their order.
pub struct PageOrder {
    blocks: Arc<[Pages]>,
    /// Set if lanes send the background pages, and this side sends the requested ones.
    lanes: Option<Arc<LanePages>>,
    /// Block indices in the order of the background.
    sequence: Vec<usize>,
    /// The next position of the background: an index into `sequence`, and a page.
    cursor: (usize, u64),
    /// Requested runs, oldest first, with the time of each request. Some pages of a run may have been sent
    /// since.
    queue: VecDeque<(PageRun, Duration)>,
    /// Set if requests arrived while the queue was full. Their pages are only in `Pages::requested`, and none
    /// precedes this position (block, page).
    overflow: Option<(usize, u64)>,
    /// Chunks (block, number) that the background sends first.
    first: VecDeque<(usize, u64)>,
    /// Chunks (block, number) around recent requests, oldest first.
    near: VecDeque<(usize, u64)>,
}

impl PageOrder {
    /// Starts with blocks of these numbers of pages, of which none was sent. `sequence` names each block once,
    /// in the order of the background.
    pub fn new(pages: &[u64], sequence: Vec<usize>) -> Self {
        debug_assert!(sequence.len() == pages.len());
        Self {
            blocks: pages.iter().map(|pages| Pages::unsent(*pages)).collect(),
            lanes: None,
            sequence,
            cursor: (0, 0),
            queue: VecDeque::new(),
            overflow: None,
            first: VecDeque::new(),
            near: VecDeque::new(),
        }
    }

    /// Lets the background begin with these pages, in their order and by whole chunks. Pages that do not exist are
    /// ignored.
    pub fn begin_with(&mut self, runs: impl IntoIterator<Item = PageRun>) {
        let mut seen = HashSet::new();
        for run in runs {
            let Some(pages) = self.blocks.get(run.block).map(|block| block.unsent.pages()) else { continue };
            let chunks = run.first / CHUNK_PAGES..run.end().min(pages).div_ceil(CHUNK_PAGES);
            self.first.extend(chunks.map(|chunk| (run.block, chunk)).filter(|chunk| seen.insert(*chunk)));
        }
    }

    /// Starts with the pages whose bits are set in `unsent`. The background uses the order of the blocks.
    pub fn of_unsent(unsent: &[PageBitmap]) -> Self {
        let pages: Vec<u64> = unsent.iter().map(PageBitmap::pages).collect();
        let order = Self::new(&pages, (0..pages.len()).collect());
        for (pages, bits) in order.blocks.iter().zip(unsent) {
            pages.unsent.clear_all();
            pages::add(&pages.unsent, bits);
        }
        order
    }

    /// Lets lanes send the background from now on. Requested pages are taken here as before. If a lane has
    /// taken a requested page already, it is sent a second time.
    ///
    /// `units`: for each block, the smallest number of pages that a lane takes together.
    pub(crate) fn share(&mut self, units: &[u64]) -> Arc<LanePages> {
        self.blocks.iter().for_each(Pages::share);
        let lanes = Arc::new(LanePages::new(Arc::clone(&self.blocks), units));
        self.lanes = Some(Arc::clone(&lanes));
        lanes
    }

    /// Forgets requests and lanes after a lost connection, because pages on their way may be lost. Call
    /// [`received`](Self::received) for each block afterwards. The destination repeats its requests.
    pub fn forget_requests(&mut self) {
        self.queue.clear();
        self.near.clear();
        self.overflow = None;
        self.cursor = (0, 0);
        self.lanes = None;
        self.blocks.iter().for_each(|pages| pages.requested.clear_all());
    }

    /// Sets the pages of block `block` that the destination has. It lacks all others.
    pub fn received(&mut self, block: usize, received: &ReceivedPages) {
        let unsent = &self.blocks[block].unsent;
        unsent.set_all();
        for (lacks, came) in unsent.words().iter().zip(received.words()) {
            lacks.fetch_and(!came, Ordering::AcqRel);
        }
    }

    /// A page in `received` that was never sent, which a correct destination cannot have.
    pub fn unsent_among(&self, block: usize, received: &ReceivedPages) -> Option<u64> {
        let unsent = self.blocks[block].unsent.words();
        let both =
            unsent.iter().zip(received.words()).map(|(unsent, came)| unsent.load(Ordering::Relaxed) & came);
        let (index, word) = both.enumerate().find(|(_, word)| *word != 0)?;
        Some(index as u64 * 64 + u64::from(word.trailing_zeros()))
    }

    /// Queues a request of the destination. Pages that were sent or are already queued are ignored.
    pub fn request(&mut self, block: usize, start: u64, length: u64) -> Result<(), BadRequest> {
        self.request_at(block, start, length, Duration::ZERO)
    }

    /// As [`request`](Self::request), with the time at which the request arrived.
    pub fn request_at(
        &mut self,
        block: usize,
        start: u64,
        length: u64,
        came: Duration,
    ) -> Result<(), BadRequest> {
        let pages = &self.blocks[block];
        let block_bytes = pages.unsent.pages() << PAGE_SHIFT;
        if !(start | length).is_multiple_of(PAGE_SIZE as u64) {
            return Err(BadRequest::Unaligned);
        }
        if length == 0 {
            return Err(BadRequest::Empty);
        }
        if start.checked_add(length).is_none_or(|end| end > block_bytes) {
            return Err(BadRequest::Outside { block_bytes });
        }
        let (first, end) = (start >> PAGE_SHIFT, (start + length) >> PAGE_SHIFT);
        let mut at = first;
        while let Some(run) = pages.askable(self.lanes.is_some()).next_run(at, end, u64::MAX) {
            if pages.requested.set_range(run.first, run.count) > 0 {
                match self.queue.len() < QUEUE {
                    true => {
                        let run = PageRun { block, first: run.first, count: run.count };
                        self.queue.push_back((run, came));
                    }
                    false => {
                        let here = (block, run.first);
                        self.overflow = Some(self.overflow.map_or(here, |first| first.min(here)));
                    }
                }
            }
            at = run.end();
        }
        Ok(())
    }

    /// Whether requested pages wait.
    pub fn has_requests(&self) -> bool {
        self.overflow.is_some() || !self.queue.is_empty()
    }

    /// Takes a run of up to `most` requested pages, to be sent now.
    pub fn take_requested(&mut self, most: u64) -> Option<PageRun> {
        self.take_requested_at(most).map(|(run, _)| run)
    }

    /// As [`take_requested`](Self::take_requested), with the time of the request. The time is given only with a
    /// request's last pages, and only if it is remembered.
    pub fn take_requested_at(&mut self, most: u64) -> Option<(PageRun, Option<Duration>)> {
        let run = self.take_first_requested(most);
        self.drop_sent_requests();
        run
    }

    /// Removes requests without unsent pages, because the background waits while requests exist. Several
    /// requests may name the same page.
    fn drop_sent_requests(&mut self) {
        let is_left =
            |block: usize, first, end| self.blocks[block].requested.next_run(first, end, 1).is_some();
        while self.queue.front().is_some_and(|(run, _)| !is_left(run.block, run.first, run.end())) {
            self.queue.pop_front();
        }
        if let Some((from, page)) = self.overflow {
            let starts = std::iter::once(page).chain(std::iter::repeat(0));
            let mut blocks = (from..self.blocks.len()).zip(starts);
            if !blocks.any(|(block, first)| is_left(block, first, u64::MAX)) {
                self.overflow = None;
            }
        }
    }

    fn take_first_requested(&mut self, most: u64) -> Option<(PageRun, Option<Duration>)> {
        let has_lanes = self.lanes.is_some();
        while let Some((mut wanted, at)) = self.queue.pop_front() {
            let pages = &self.blocks[wanted.block];
            let Some(run) = pages.take_requested(wanted.first, wanted.end(), most, has_lanes) else {
                continue;
            };
            let run = PageRun { block: wanted.block, first: run.first, count: run.count };
            let is_last = run.end() == wanted.end();
            if !is_last {
                wanted.count = wanted.end() - run.end();
                wanted.first = run.end();
                self.queue.push_front((wanted, at));
            }
            self.note_near(run);
            return Some((run, is_last.then_some(at)));
        }
        let (from, mut at) = self.overflow?;
        for (block, pages) in self.blocks.iter().enumerate().skip(from) {
            if let Some(run) = pages.take_requested(at, u64::MAX, most, has_lanes) {
                self.overflow = Some((block, run.end()));
                return Some((PageRun { block, first: run.first, count: run.count }, None));
            }
            at = 0;
        }
        self.overflow = None;
        None
    }

    /// Takes the next pages when none is requested. All of them are in one chunk.
    pub fn take_background(&mut self) -> Option<PageRun> {
        while let Some((block, chunk)) = self.first.front().copied() {
            if let Some(run) = self.blocks[block].take_in(chunk) {
                return Some(PageRun { block, first: run.first, count: run.count });
            }
            self.first.pop_front();
        }
        while let Some((block, chunk)) = self.near.front().copied() {
            if let Some(run) = self.blocks[block].take_in(chunk) {
                return Some(PageRun { block, first: run.first, count: run.count });
            }
            self.near.pop_front();
        }
        let (block, chunk) = *self.ahead(1).first()?;
        let run = self.blocks[block].take_in(chunk)?;
        Some(PageRun { block, first: run.first, count: run.count })
    }

    /// The next `count` chunks (block, number) of the background, in the present state. Moves the cursor to the
    /// first.
    pub fn ahead(&mut self, count: usize) -> Vec<(usize, u64)> {
        let is_left = |(block, chunk): &(usize, u64)| {
            let first = chunk * CHUNK_PAGES;
            self.blocks[*block].unsent.next_run(first, first + CHUNK_PAGES, 1).is_some()
        };
        let mut found: Vec<_> = self.first.iter().copied().filter(is_left).take(count).collect();
        let (mut index, mut page) = self.cursor;
        while found.len() < count {
            let Some(block) = self.sequence.get(index).copied() else { break };
            match self.blocks[block].unsent.next_run(page, u64::MAX, 1) {
                Some(run) => {
                    let chunk = run.first / CHUNK_PAGES;
                    if found.is_empty() {
                        self.cursor = (index, run.first);
                    }
                    found.push((block, chunk));
                    page = (chunk + 1) * CHUNK_PAGES;
                }
                None => (index, page) = (index + 1, 0),
            }
        }
        found
    }

    /// Number of pages of block `block`.
    pub fn pages(&self, block: usize) -> u64 {
        self.blocks[block].unsent.pages()
    }

    /// Number of pages that were not taken yet.
    pub fn unsent_pages(&self) -> u64 {
        self.blocks.iter().map(|pages| pages.unsent.count()).sum()
    }

    /// Notes the chunk of a request, because a guest often touches neighbouring pages next.
    fn note_near(&mut self, run: PageRun) {
        let chunk = (run.block, run.first / CHUNK_PAGES);
        if let Some(lanes) = &self.lanes {
            return lanes.note_near(run);
        }
        if self.near.contains(&chunk) {
            return;
        }
        if self.near.len() == NEIGHBOURHOODS {
            self.near.pop_front();
        }
        self.near.push_back(chunk);
    }
}

#[cfg(test)]
mod tests;
