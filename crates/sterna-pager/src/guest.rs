//! The memory of one guest: which pages are placed, missing and removed.
//!
//! Pages are numbered by their place in the image. A page that the VMM removes reads as zeros from then on, so the image's
//! content must never be placed there afterwards. The kernel delays a removal until its event is read. Events are therefore
//! read and noted under a lock (`order`) that excludes every thread that places pages.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use sterna_ram::PageBitmap;
use sterna_ram::peer_memory::{PeerEvent, PeerMemory, Placed, PlacingEnd};

use crate::error::GuestError;
use crate::handshake::{Handshake, Region};
use crate::load::Waiting;
use crate::owner::Owner;
use crate::source::{HUGE_BYTES, PAGE_BYTES};
use crate::statistics::{GuestEnd, GuestStage, GuestStatistics};

/// Most events that are read before the faults among them are answered.
const MOST_EVENTS: usize = 4096;
/// Most bytes that are placed while events cannot be read.
pub(crate) const PIECE_BYTES: usize = 64 << 10;
/// Content of a huge zero page, for which the kernel has no call.
static ZEROS: LazyLock<Vec<u8>> = LazyLock::new(|| vec![0; HUGE_BYTES as usize]);

/// A fault that was read and is not answered yet.
pub(crate) struct Fault {
    pub(crate) page: u64,
    /// The background fill pauses while this value exists.
    pub(crate) _waiting: Waiting,
}

/// The result of placing a page or a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Put {
    Done,
    /// Events must be read first.
    Again,
    /// The VMM ends.
    Gone,
}

/// What is placed.
#[derive(Clone, Copy)]
enum Content<'a> {
    Zero,
    Bytes(&'a [u8]),
}

pub(crate) struct Guest {
    /// The socket, or the name of a guest of this process.
    given_name: String,
    pub(crate) owner: Owner,
    pub(crate) memory: PeerMemory,
    /// Sorted by offset, without gaps.
    regions: Vec<Region>,
    page_bytes: u64,
    /// Pages that are neither placed nor removed.
    missing: PageBitmap,
    left: AtomicU64,
    /// Pages that read as zeros, whatever the image contains.
    removed: PageBitmap,
    /// Held exclusively while events are read, and shared while pages are placed.
    order: RwLock<()>,
    is_over: AtomicBool,
    end: Mutex<Option<(GuestEnd, Duration)>>,
    began: Instant,
    faults: AtomicU64,
    content_pages: AtomicU64,
    zero_pages: AtomicU64,
}

impl Guest {
    /// A guest whose handshake was checked against the image.
    pub(crate) fn new(handshake: Handshake, memory: PeerMemory, owner: Owner, given_name: String) -> Self {
        let bytes: u64 = handshake.regions.iter().map(|region| region.bytes).sum();
        let pages = bytes / handshake.page_bytes;
        let missing = PageBitmap::new(pages);
        missing.set_all();
        Self {
            given_name,
            owner,
            memory,
            regions: handshake.regions,
            page_bytes: handshake.page_bytes,
            missing,
            left: AtomicU64::new(pages),
            removed: PageBitmap::new(pages),
            order: RwLock::new(()),
            is_over: AtomicBool::new(false),
            end: Mutex::new(None),
            began: Instant::now(),
            faults: AtomicU64::new(0),
            content_pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
        }
    }

    pub(crate) fn name(&self) -> String {
        match (&self.owner, self.owner.pid()) {
            (Owner::Peer { .. }, Some(pid)) => format!("{} (pid {pid})", self.given_name),
            _ => self.given_name.clone(),
        }
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Whether the guest needs nothing any more.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(crate) fn is_removed(&self, page: u64) -> bool {
        self.removed.get(page)
    }

    /// Whether a page is missing that these bytes of the image overlap.
    pub(crate) fn lacks(&self, bytes: &Range<u64>) -> bool {
        let pages = bytes.start / self.page_bytes..bytes.end.div_ceil(self.page_bytes);
        self.missing.next_run(pages.start, pages.end, 1).is_some()
    }

    /// Offset in the image of the first missing page at or after `offset`.
    pub(crate) fn next_missing(&self, offset: u64) -> Option<u64> {
        let run = self.missing.next_run(offset / self.page_bytes, self.missing.pages(), 1)?;
        Some((run.first * self.page_bytes).max(offset))
    }

    /// Reads all waiting events, and notes removed pages. Returns the faults.
    pub(crate) fn read_events(&self, waiting: impl Fn() -> Waiting) -> Result<Vec<Fault>, GuestError> {
        let mut events = Vec::new();
        let order = self.order.write();
        while self.memory.read(&mut events).map_err(|error| GuestError::Events(Arc::new(error)))?
            && events.len() < MOST_EVENTS
        {}
        for event in &events {
            match event {
                PeerEvent::Removed(range) => self.remove(range),
                PeerEvent::Moved(range) => return Err(GuestError::Moved(range.clone())),
                _ => {}
            }
        }
        drop(order);
        let mut faults: Vec<Fault> = Vec::new();
        for event in events {
            let PeerEvent::Fault { address } = event else { continue };
            let page = self.page_at(address).ok_or(GuestError::Outside { address })?;
            faults.push(Fault { page, _waiting: waiting() });
        }
        self.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        Ok(faults)
    }

    /// Places one page for a thread that waits for it. `content`: the image's content of the page, or `None` for zeros.
    pub(crate) fn put_page(&self, page: u64, content: Option<&[u8]>) -> Result<Put, GuestError> {
        let _order = self.order.read();
        let content = match content {
            Some(bytes) if !self.is_removed(page) && !is_zero(bytes) => Content::Bytes(bytes),
            _ => Content::Zero,
        };
        let (address, _) = self.locate(page);
        let placed = self.place(address, page, 1, content);
        match placed.end {
            None => Ok(Put::Done),
            // Another thread placed the page. The waiting thread may have begun to wait just before.
            Some(PlacingEnd::Present | PlacingEnd::NotRegistered) => {
                self.note_placed(page, 1);
                let _ = self.memory.wake(&(address..address + self.page_bytes));
                Ok(Put::Done)
            }
            Some(end) => self.judge(end, address),
        }
    }

    /// Places the missing pages among those that `content` contains. It begins at byte `offset` of the image, and both are
    /// whole pages of the guest.
    pub(crate) fn put_run(&self, offset: u64, content: &[u8]) -> Result<Put, GuestError> {
        self.fill(offset, content.len() as u64, Some(content))
    }

    /// Places zeros at the missing pages of these bytes of the image.
    pub(crate) fn put_zeros(&self, offset: u64, bytes: u64) -> Result<Put, GuestError> {
        self.fill(offset, bytes, None)
    }

    fn fill(&self, offset: u64, bytes: u64, content: Option<&[u8]>) -> Result<Put, GuestError> {
        let first = offset / self.page_bytes;
        let end = first + bytes / self.page_bytes;
        let _order = self.order.read();
        let page_of = |page: u64| {
            let start = ((page - first) * self.page_bytes) as usize;
            content.map(|content| &content[start..start + self.page_bytes as usize])
        };
        let mut at = first;
        while let Some(run) = self.missing.next_run(at, end, u64::MAX) {
            let (address, in_region) = self.locate(run.first);
            let limit = run.end().min(run.first + in_region);
            // The pages from here on that are zero, or that are not.
            let zero = |page: u64| page_of(page).is_none_or(is_zero);
            let is_first_zero = zero(run.first);
            let until = (run.first + 1..limit).find(|page| zero(*page) != is_first_zero).unwrap_or(limit);
            let count = until - run.first;
            let start = ((run.first - first) * self.page_bytes) as usize;
            let content = match content {
                Some(content) if !is_first_zero => {
                    Content::Bytes(&content[start..start + (count * self.page_bytes) as usize])
                }
                // Shared memory would be allocated. A page that is left out reads as zeros after the registration has
                // ended, and until then a fault gets it.
                _ if self.is_own() => {
                    self.note_placed(run.first, count);
                    self.zero_pages.fetch_add(count, Ordering::Relaxed);
                    at = until;
                    continue;
                }
                _ => Content::Zero,
            };
            let placed = self.place(address, run.first, count, content);
            at = run.first + placed.bytes / self.page_bytes;
            match placed.end {
                None => {}
                // The next page is there by another way, or is not the guest's any more.
                Some(PlacingEnd::Present | PlacingEnd::NotRegistered) => {
                    self.note_placed(at, 1);
                    at += 1;
                }
                // The kernel stopped after some pages.
                Some(PlacingEnd::Changing) if placed.bytes > 0 => {}
                Some(end) => return self.judge(end, address + placed.bytes),
            }
        }
        Ok(Put::Done)
    }

    /// Whether all pages are placed or removed.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Ends the registration of complete memory, so that the guest does not need this process any more.
    pub(crate) fn release(&self) {
        let _order = self.order.write();
        for region in &self.regions {
            // A part that was unmapped, or a VMM that ends, needs nothing.
            if let Err(error) = self.memory.unregister(&(region.address..region.address + region.bytes)) {
                tracing::debug!("{}: unregistering {:#x}: {error}", self.name(), region.address);
            }
        }
        self.discard_events();
    }

    /// Reads all events of a guest that needs nothing any more.
    pub(crate) fn discard_events(&self) {
        let mut events = Vec::new();
        while self.memory.read(&mut events).unwrap_or(false) {
            events.clear();
        }
    }

    /// Whether this process runs the guest.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.owner, Owner::Own(_))
    }

    /// The runs of missing pages, among pages of 4 KiB.
    pub(crate) fn missing_small(&self, first: u64, count: u64, owed: &mut dyn FnMut(u64, u64)) {
        let unit = self.page_bytes / PAGE_BYTES;
        let (mut at, end) = (first / unit, (first + count).div_ceil(unit));
        while let Some(run) = self.missing.next_run(at, end, u64::MAX) {
            let start = (run.first * unit).max(first);
            owed(start, (run.end() * unit).min(first + count) - start);
            at = run.end();
        }
    }

    /// Notes that the whole pages among these, of 4 KiB each, read as zeros from now on.
    pub(crate) fn give_back(&self, first: u64, count: u64) {
        let _order = self.order.write();
        let unit = self.page_bytes / PAGE_BYTES;
        let (first, end) = (first.div_ceil(unit), (first + count) / unit);
        if first < end {
            self.removed.set_range(first, end - first);
            self.note_placed(first, end - first);
        }
    }

    /// Notes the end, if it is the first. Returns whether it was.
    pub(crate) fn finish(&self, end: impl FnOnce(&Owner) -> GuestEnd) -> bool {
        let mut ended = self.end.lock();
        if ended.is_some() {
            return false;
        }
        self.is_over.store(true, Ordering::Release);
        *ended = Some((end(&self.owner), self.began.elapsed()));
        true
    }

    /// Why missing pages are not placed any more.
    pub(crate) fn failure(&self) -> Option<GuestError> {
        match &*self.end.lock() {
            None | Some((GuestEnd::Completed, _)) => None,
            Some((GuestEnd::GivenUp { why, .. }, _)) => Some(why.clone()),
            Some((GuestEnd::PeerEnded, _)) => Some(GuestError::Stopped),
        }
    }

    pub(crate) fn statistics(&self) -> GuestStatistics {
        let end = self.end.lock().clone();
        let time = end.as_ref().map_or_else(|| self.began.elapsed(), |(_, time)| *time);
        GuestStatistics {
            socket: self.given_name.clone(),
            pid: self.owner.pid(),
            stage: end.map_or(GuestStage::Active, |(end, _)| GuestStage::Ended(end)),
            total_pages: self.missing.pages(),
            missing_pages: self.left.load(Ordering::Relaxed),
            page_bytes: self.page_bytes,
            faults: self.faults.load(Ordering::Relaxed),
            content_pages: self.content_pages.load(Ordering::Relaxed),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            removed_pages: self.removed.count(),
            time,
        }
    }

    /// Fills `count` pages from `page` on, which lie at `address` in one region, and counts them.
    fn place(&self, address: u64, page: u64, count: u64, content: Content<'_>) -> Placed {
        let bytes = count * self.page_bytes;
        let placed = match content {
            Content::Bytes(content) => self.memory.copy(address, content),
            Content::Zero if self.page_bytes == PAGE_BYTES => self.memory.zero(&(address..address + bytes)),
            // One page per call, because the zeros are those of one page.
            Content::Zero => self.memory.copy(address, &ZEROS),
        };
        let pages = placed.bytes / self.page_bytes;
        self.note_placed(page, pages);
        let counter = if matches!(content, Content::Zero) { &self.zero_pages } else { &self.content_pages };
        counter.fetch_add(pages, Ordering::Relaxed);
        placed
    }

    fn note_placed(&self, first: u64, count: u64) {
        let placed = self.missing.clear_range(first, count);
        self.left.fetch_sub(placed, Ordering::AcqRel);
    }

    fn judge(&self, end: PlacingEnd, address: u64) -> Result<Put, GuestError> {
        match end {
            PlacingEnd::Present | PlacingEnd::NotRegistered => Ok(Put::Done),
            PlacingEnd::Changing => Ok(Put::Again),
            PlacingEnd::Gone => Ok(Put::Gone),
            PlacingEnd::Failed(source) => Err(GuestError::Place { address, source: Arc::new(source) }),
        }
    }

    /// Notes that the whole pages in this range of addresses read as zeros.
    fn remove(&self, range: &Range<u64>) {
        for region in &self.regions {
            let start = range.start.max(region.address).next_multiple_of(self.page_bytes);
            let end = range.end.min(region.address + region.bytes) & !(self.page_bytes - 1);
            if start >= end {
                continue;
            }
            let first = (region.offset + (start - region.address)) / self.page_bytes;
            let count = (end - start) / self.page_bytes;
            self.removed.set_range(first, count);
            self.note_placed(first, count);
        }
    }

    /// The page of an address in the VMM.
    fn page_at(&self, address: u64) -> Option<u64> {
        let inside = |region: &&Region| region.address <= address && address - region.address < region.bytes;
        let region = self.regions.iter().find(inside)?;
        Some((region.offset + (address - region.address)) / self.page_bytes)
    }

    /// The address of a page in the VMM, and the number of pages from there to the end of its region.
    fn locate(&self, page: u64) -> (u64, u64) {
        let offset = page * self.page_bytes;
        let region = &self.regions[self.regions.partition_point(|region| region.offset <= offset) - 1];
        let inside = offset - region.offset;
        (region.address + inside, (region.bytes - inside) / self.page_bytes)
    }
}

/// Whether all bytes are zero. The first line decides most pages that are not.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
