//! Cache of the standby's pages, for checkpoints with differences (`specs/replica.md §4`).
//!
//! The standby holds each page that a checkpoint has sent, or will hold it before it reads the next checkpoint.
//! The reason: checkpoints are held and put into RAM in order. A checkpoint that is dropped ends the protection,
//! and this cache with it.
//!
//! Each page has one slot, which follows from its number. If the cache is smaller than RAM, several pages share a
//! slot. A page that was sent in this checkpoint or the previous one keeps its slot. Therefore a guest that
//! writes more pages than the cache has slots still gets differences for some of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use sterna_ram::{GuestRam, PAGE_SIZE, RamFault, RamSlice};
use sterna_wire::xbzrle;

use crate::order::PageRun;

/// The encoding and the length precede a difference. A longer difference saves nothing.
const LONGEST: usize = PAGE_SIZE - 4;

/// Counts of how pages of checkpoints were sent.
#[derive(Debug, Default)]
pub struct DeltaCounts {
    /// Pages that were sent as a difference.
    pub pages: AtomicU64,
    /// Bytes of the differences.
    pub bytes: AtomicU64,
    /// Pages that were not sent, because the standby holds the same content.
    pub same: AtomicU64,
    /// Pages that were sent whole, because the standby's content was not in the cache.
    pub misses: AtomicU64,
    /// Pages that were sent whole, because the difference was not shorter.
    pub overflows: AtomicU64,
}

/// How a page is sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Coded<'a> {
    /// The page is not sent, because the standby holds the same content.
    Same,
    /// The page is sent as this difference, followed by the content that results from it.
    Delta(&'a [u8], &'a [u8; PAGE_SIZE]),
    /// The page is sent whole with this content, which is in the cache now.
    ///
    /// A caller that sends the page from other memory must be sure that the page has not changed.
    Whole(&'a [u8; PAGE_SIZE]),
    /// The page is sent whole, and is not in the cache.
    Uncached,
}

/// Pages as the standby holds them. All lanes share the cache; one lane sends a page, once per checkpoint.
pub(crate) struct DeltaCache {
    slots: Vec<Mutex<Slot>>,
    /// For each block, the number of its first page among all pages.
    first_pages: Vec<u64>,
    counts: Arc<DeltaCounts>,
}

/// Buffers in which a lane encodes pages.
pub(crate) struct Scratch {
    new: Box<[u8; PAGE_SIZE]>,
    delta: Vec<u8>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self { new: Box::new([0; PAGE_SIZE]), delta: Vec::new() }
    }
}

#[derive(Default)]
struct Slot {
    /// The number of the page in this slot, among all pages.
    page: u64,
    /// The checkpoint in which the page was sent last.
    sent_in: u64,
    /// The content at the standby; `None` if the slot is unused.
    held: Option<Box<[u8; PAGE_SIZE]>>,
}

impl DeltaCache {
    /// An empty cache of at most `limit_bytes` (at least a page). It allocates memory as pages are sent.
    pub(crate) fn new(ram: &GuestRam, limit_bytes: u64, counts: Arc<DeltaCounts>) -> Self {
        let mut pages = 0;
        let first_page = |block: &sterna_ram::RamBlock| {
            pages += block.pages();
            pages - block.pages()
        };
        let first_pages = ram.blocks().iter().map(first_page).collect();
        let slots = (limit_bytes / PAGE_SIZE as u64).clamp(1, pages.max(1));
        let slots = std::iter::repeat_with(Mutex::default).take(slots as usize).collect();
        Self { slots, first_pages, counts }
    }

    /// Decides how to send `page` of `block` with this content in checkpoint `number`.
    ///
    /// The caller must send the page in this way, because the cache assumes it.
    ///
    /// # Errors
    /// Reading this host's memory failed.
    pub(crate) fn send<'a>(
        &self,
        number: u64,
        (block, page): (usize, u64),
        content: &RamSlice<'_>,
        scratch: &'a mut Scratch,
    ) -> Result<Coded<'a>, RamFault> {
        let Scratch { new, delta } = scratch;
        let page = self.first_pages[block] + page;
        let mut slot = self.slot(page);
        if slot.held.is_some() && slot.page != page && slot.sent_in + 1 >= number {
            count(&self.counts.misses, 1);
            return Ok(Coded::Uncached);
        }
        // The guest may write meanwhile. One copy ensures that the same bytes are compared, sent and kept.
        content.copy_to(&mut new[..])?;
        let is_known = slot.page == page;
        (slot.page, slot.sent_in) = (page, number);
        let Some(held) = slot.held.as_mut().filter(|_| is_known) else {
            count(&self.counts.misses, 1);
            slot.keep(new);
            return Ok(Coded::Whole(new));
        };
        if **held == **new {
            count(&self.counts.same, 1);
            return Ok(Coded::Same);
        }
        delta.clear();
        let is_shorter = xbzrle::encode(held, new, LONGEST, delta);
        **held = **new;
        if !is_shorter {
            count(&self.counts.overflows, 1);
            return Ok(Coded::Whole(new));
        }
        count(&self.counts.pages, 1);
        count(&self.counts.bytes, delta.len() as u64);
        Ok(Coded::Delta(delta, new))
    }

    /// Removes the pages of `run`, because the standby's content is unknown.
    ///
    /// They are sent from memory that may change.
    pub(crate) fn forget(&self, run: PageRun) {
        for page in run.first..run.end() {
            let page = self.first_pages[run.block] + page;
            let mut slot = self.slot(page);
            if slot.page == page {
                slot.held = None;
            }
        }
        count(&self.counts.misses, run.count);
    }

    /// Records that the pages of `run` are sent as zero in checkpoint `number`.
    pub(crate) fn zero(&self, number: u64, run: PageRun) {
        for page in run.first..run.end() {
            let page = self.first_pages[run.block] + page;
            let mut slot = self.slot(page);
            let is_known = slot.page == page;
            if let Some(held) = slot.held.as_mut().filter(|_| is_known) {
                held.fill(0);
                slot.sent_in = number;
            }
        }
    }

    fn slot(&self, page: u64) -> parking_lot::MutexGuard<'_, Slot> {
        self.slots[(page % self.slots.len() as u64) as usize].lock()
    }
}

impl Slot {
    fn keep(&mut self, content: &[u8; PAGE_SIZE]) {
        let held = self.held.get_or_insert_with(|| Box::new([0; PAGE_SIZE]));
        **held = *content;
    }
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, RamBlock};

    use super::*;

    const PAGES: u64 = 8;

    fn guest() -> GuestRam {
        let block = |name: &str| RamBlock::new(name, PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        GuestRam::new(vec![block("m0"), block("m1")]).unwrap()
    }

    fn write(ram: &GuestRam, (block, page): (usize, u64), content: &[u8; PAGE_SIZE]) {
        ram.block(block).write(page * PAGE_SIZE as u64, content).unwrap();
    }

    /// Sends the page and applies the result to `there`, as a standby does. Gives how it was sent.
    fn send(
        cache: &DeltaCache,
        number: u64,
        (block, page): (usize, u64),
        here: &GuestRam,
        there: &GuestRam,
    ) -> &'static str {
        let content = here.block(block).page(page).unwrap();
        let mut held = [0; PAGE_SIZE];
        let at = page * PAGE_SIZE as u64;
        there.block(block).read(at, &mut held).unwrap();
        let mut scratch = Scratch::default();
        let how = match cache.send(number, (block, page), &content, &mut scratch).unwrap() {
            Coded::Same => "same",
            Coded::Delta(delta, becomes) => {
                xbzrle::apply(delta, &mut held).unwrap();
                assert_eq!(held, *becomes);
                "delta"
            }
            Coded::Whole(bytes) => {
                held = *bytes;
                "whole"
            }
            Coded::Uncached => {
                content.copy_to(&mut held).unwrap();
                "uncached"
            }
        };
        there.block(block).write(at, &held).unwrap();
        let mut ours = [0; PAGE_SIZE];
        here.block(block).read(at, &mut ours).unwrap();
        assert_eq!(held, ours);
        how
    }

    fn noise(seed: u64) -> [u8; PAGE_SIZE] {
        let mut random = fastrand::Rng::with_seed(seed);
        std::array::from_fn(|_| random.u8(..))
    }

    #[test]
    fn page_goes_out_in_the_shortest_way_and_arrives_whole() {
        let (here, there) = (guest(), guest());
        let counts = Arc::<DeltaCounts>::default();
        let cache = DeltaCache::new(&here, 1 << 20, Arc::clone(&counts));
        let page = (1, 3);
        let mut content = noise(1);
        write(&here, page, &content);
        assert_eq!(send(&cache, 1, page, &here, &there), "whole");
        assert_eq!(send(&cache, 2, page, &here, &there), "same");
        content[70] ^= 1;
        content[4095] ^= 1;
        write(&here, page, &content);
        assert_eq!(send(&cache, 3, page, &here, &there), "delta");
        write(&here, page, &noise(2));
        assert_eq!(send(&cache, 4, page, &here, &there), "whole", "the difference is no shorter");
        // The page with the same number in another block is a different page.
        assert_eq!(send(&cache, 4, (0, 3), &here, &there), "whole");

        cache.zero(5, PageRun { block: 1, first: 2, count: 3 });
        there.block(1).zero_present_pages(2, 3).unwrap();
        content = [0; PAGE_SIZE];
        content[9] = 9;
        write(&here, page, &content);
        assert_eq!(send(&cache, 6, page, &here, &there), "delta", "against zeros");

        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!((get(&counts.pages), get(&counts.same)), (2, 1));
        assert_eq!((get(&counts.misses), get(&counts.overflows)), (2, 1));
        assert_eq!(get(&counts.bytes), (3 + 3 + 1) + 3);
    }

    #[test]
    fn page_whose_slot_another_one_took_goes_out_whole() {
        let (here, there) = (guest(), guest());
        // Pages 1 and 5 of a block share one of four slots.
        let cache = DeltaCache::new(&here, 4 * PAGE_SIZE as u64, Arc::default());
        write(&here, (0, 1), &noise(1));
        write(&here, (0, 5), &noise(2));
        assert_eq!(send(&cache, 1, (0, 1), &here, &there), "whole");
        assert_eq!(send(&cache, 1, (0, 5), &here, &there), "uncached");
        assert_eq!(send(&cache, 2, (0, 5), &here, &there), "uncached", "the other one is still new");
        assert_eq!(send(&cache, 3, (0, 5), &here, &there), "whole", "now it is old");
        assert_eq!(send(&cache, 3, (0, 1), &here, &there), "uncached");
        // Zero pages of other pages do not change a slot.
        cache.zero(4, PageRun { block: 0, first: 1, count: 1 });
        assert_eq!(send(&cache, 4, (0, 5), &here, &there), "same");
    }

    #[test]
    fn page_that_may_have_changed_while_it_was_sent_is_no_base() {
        let (here, there) = (guest(), guest());
        let cache = DeltaCache::new(&here, 1 << 20, Arc::default());
        write(&here, (0, 3), &noise(1));
        assert_eq!(send(&cache, 1, (0, 3), &here, &there), "whole");
        cache.forget(PageRun { block: 0, first: 2, count: 2 });
        write(&there, (0, 3), &noise(2));
        assert_eq!(send(&cache, 3, (0, 3), &here, &there), "whole");
        assert_eq!(send(&cache, 4, (0, 3), &here, &there), "same");
    }

    #[test]
    fn cache_is_never_larger_than_ram() {
        let cache = DeltaCache::new(&guest(), u64::MAX, Arc::default());
        assert_eq!(cache.slots.len() as u64, 2 * PAGES);
        assert_eq!(DeltaCache::new(&guest(), 0, Arc::default()).slots.len(), 1);
    }
}
