//! Gathers the pages of a stream to extents, and gives the extents to threads that compress them.
//!
//! An extent is given away when all its pages have arrived, so that the memory does not depend on the guest's size. A page of
//! an extent that is already stored brings the extent back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, Builder, ScopedJoinHandle};

use parking_lot::{Condvar, Mutex};
use sterna_ram::PageBitmap;
use sterna_store::{ImageWriter, StoredImage};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE, xbzrle};

use super::super::counts::Counts;
use super::record::Recorder;
use crate::error::ImageError;
use crate::model::Shape;
use crate::read::body::RecordSink;

/// Extents that wait for a thread.
const WAITING: usize = 4;
/// Bytes of extents whose pages have not all arrived.
const OPEN_BYTES: usize = 64 << 20;

/// An extent on its way to a thread: block, number, content, and the pages that changed if the others are the base's.
type Work = (usize, u64, Vec<u8>, Option<Vec<u8>>);
/// The pages that are not zero, for each block; whether pages had several contents.
type Gathered<T> = (T, Vec<PageBitmap>, bool);

/// Runs `read` with a sink for the stream's records, and stores all pages.
pub(super) fn run<T>(
    writer: &ImageWriter,
    threads: usize,
    counts: &Counts,
    recorder: &Recorder,
    base: Option<&StoredImage>,
    read: impl FnOnce(&mut Gather<'_>) -> Result<T, ImageError>,
) -> Result<Gathered<T>, ImageError> {
    let flight = Flight::default();
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(WAITING);
        let receiver = Arc::new(Mutex::new(receiver));
        let mut workers = Vec::new();
        for _ in 0..threads.max(1) {
            let (receiver, flight) = (Arc::clone(&receiver), &flight);
            match Builder::new().spawn_scoped(scope, move || work(writer, &receiver, flight)) {
                Ok(worker) => workers.push(worker),
                // If the host refuses a thread, fewer threads do the work, but at least one is needed.
                Err(_) if !workers.is_empty() => break,
                Err(error) => return Err(ImageError::io("convert", "starting a thread", error)),
            }
        }
        // The threads have their own handles. Without this one, sending fails when all of them have failed.
        drop(receiver);
        let mut gather = Gather::new(writer, sender, counts, recorder, &flight, base);
        let result = read(&mut gather).and_then(|result| gather.finish().map(|()| result));
        let (held, is_live) = gather.into_parts();
        // The error of a thread comes first, because it explains why sending to it failed.
        let done: Result<Vec<()>, ImageError> = workers.into_iter().map(join).collect();
        done?;
        Ok((result?, held, is_live))
    })
}

fn join(worker: ScopedJoinHandle<'_, Result<(), ImageError>>) -> Result<(), ImageError> {
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn work(writer: &ImageWriter, receiver: &Mutex<Receiver<Work>>, flight: &Flight) -> Result<(), ImageError> {
    let (mut lane, mut done) = (writer.lane()?, Ok(()));
    loop {
        let next = receiver.lock().recv();
        let Ok((block, extent, content, changed)) = next else { return done };
        // After an error, the extents are taken and dropped, because the reader waits until all have landed.
        if done.is_ok() {
            let put = match &changed {
                Some(changed) => lane.put_changes(block, extent, &content, changed),
                None => lane.put(block, extent, &content),
            };
            done = put.map_err(ImageError::from);
        }
        flight.landed(done.is_err());
    }
}

/// Extents that were sent and are not stored.
#[derive(Default)]
struct Flight {
    state: Mutex<InFlight>,
    change: Condvar,
}

#[derive(Default)]
struct InFlight {
    count: usize,
    has_failed: bool,
}

impl Flight {
    /// Counts an extent. Fails after an error of a thread, whose error explains it.
    fn start(&self) -> Result<(), ImageError> {
        let mut state = self.state.lock();
        if state.has_failed {
            return Err(ImageError::Request("a thread that compresses pages has failed".to_owned()));
        }
        state.count += 1;
        Ok(())
    }

    fn landed(&self, has_failed: bool) {
        let mut state = self.state.lock();
        state.count -= 1;
        state.has_failed |= has_failed;
        self.change.notify_all();
    }

    fn wait(&self) {
        let mut state = self.state.lock();
        self.change.wait_while(&mut state, |state| state.count > 0);
    }
}

/// Receives the records of a stream.
pub(super) struct Gather<'a> {
    writer: &'a ImageWriter,
    sender: SyncSender<Work>,
    counts: &'a Counts,
    recorder: &'a Recorder,
    flight: &'a Flight,
    extent_pages: u64,
    /// Extents that wait for pages, and the order in which they began.
    open: HashMap<(usize, u64), Vec<u8>>,
    order: VecDeque<(usize, u64)>,
    /// Pages that arrived, and pages that are not zero, for each block.
    seen: Vec<PageBitmap>,
    held: Vec<PageBitmap>,
    /// Extents that were given away, for each block.
    given: Vec<PageBitmap>,
    is_live: bool,
    /// Pages that do not come are the base's.
    only_changes: bool,
}

impl<'a> Gather<'a> {
    fn new(
        writer: &'a ImageWriter,
        sender: SyncSender<Work>,
        counts: &'a Counts,
        recorder: &'a Recorder,
        flight: &'a Flight,
        base: Option<&StoredImage>,
    ) -> Self {
        let bits = || writer.blocks().iter().map(|block| PageBitmap::new(block.pages())).collect();
        let held: Vec<PageBitmap> = bits();
        for (block, held) in held.iter().enumerate() {
            let words = base.map(|base| base.held_words(block)).unwrap_or_default();
            for (word, bits) in held.words().iter().zip(words) {
                word.store(bits, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let extent_pages = u64::from(writer.extent_bytes()) >> PAGE_SHIFT;
        let extents =
            writer.blocks().iter().map(|block| PageBitmap::new(block.pages().div_ceil(extent_pages)));
        Self {
            writer,
            sender,
            counts,
            recorder,
            flight,
            extent_pages,
            open: HashMap::new(),
            order: VecDeque::new(),
            seen: bits(),
            held,
            given: extents.collect(),
            is_live: false,
            only_changes: base.is_some(),
        }
    }

    /// Marks the blocks without any record as left out of the stream.
    pub(super) fn mark_skipped(&self, shape: &mut Shape) {
        for (block, seen) in shape.ram.blocks.iter_mut().zip(&self.seen) {
            block.is_skipped = seen.count() == 0;
        }
    }

    fn into_parts(self) -> (Vec<PageBitmap>, bool) {
        (self.held, self.is_live)
    }

    /// The content of a page's extent, and the page's place in it.
    fn place(&mut self, block: usize, page: u64) -> Result<&mut [u8], ImageError> {
        let extent = page / self.extent_pages;
        let key = (block, extent);
        if !self.open.contains_key(&key) {
            self.make_room()?;
            let mut content = vec![0; (self.pages_of(block, extent) << PAGE_SHIFT) as usize];
            if self.given[block].get(extent) {
                self.flight.wait();
                self.writer.read_extent(block, extent, &mut content)?;
            }
            self.open.insert(key, content);
            self.order.push_back(key);
        }
        let at = ((page % self.extent_pages) << PAGE_SHIFT) as usize;
        let content = self.open.entry(key).or_default();
        Ok(&mut content[at..at + PAGE_SIZE])
    }

    fn make_room(&mut self) -> Result<(), ImageError> {
        let most = (OPEN_BYTES >> PAGE_SHIFT) as u64 / self.extent_pages;
        while self.open.len() as u64 >= most.max(1) {
            let Some((block, extent)) = self.order.pop_front() else { return Ok(()) };
            self.give(block, extent)?;
        }
        Ok(())
    }

    fn pages_of(&self, block: usize, extent: u64) -> u64 {
        self.extent_pages.min(self.writer.blocks()[block].pages() - extent * self.extent_pages)
    }

    /// Notes that a page arrived. Gives its extent away if it was the last one.
    fn arrived(&mut self, block: usize, page: u64, is_held: bool) -> Result<(), ImageError> {
        let _ = if is_held { self.held[block].set(page) } else { self.held[block].clear(page) };
        let extent = page / self.extent_pages;
        let count = self.pages_of(block, extent);
        if self.seen[block].set(page) {
            if !self.is_live {
                self.recorder.give_up();
            }
            self.is_live = true;
        }
        match self.seen[block].count_range(extent * self.extent_pages, count) == count {
            true => self.give(block, extent),
            false => Ok(()),
        }
    }

    fn give(&mut self, block: usize, extent: u64) -> Result<(), ImageError> {
        let Some(content) = self.open.remove(&(block, extent)) else { return Ok(()) };
        if self.order.front() == Some(&(block, extent)) {
            self.order.pop_front();
        }
        self.given[block].set(extent);
        self.flight.start()?;
        let changed = self.only_changes.then(|| self.seen_in(block, extent));
        let sent = self.sender.send((block, extent, content, changed));
        sent.map_err(|_| {
            self.flight.landed(true);
            ImageError::Request("the threads that compress pages have ended".to_owned())
        })
    }

    /// The pages of an extent that arrived, as a mask.
    fn seen_in(&self, block: usize, extent: u64) -> Vec<u8> {
        let (first, count) = (extent * self.extent_pages, self.pages_of(block, extent));
        let mut words = vec![0; (self.extent_pages / 64).max(1) as usize];
        self.seen[block].copy_words(first, &mut words);
        for (at, word) in words.iter_mut().enumerate() {
            let left = count.saturating_sub(at as u64 * 64);
            *word &= if left >= 64 { u64::MAX } else { (1 << left) - 1 };
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Gives all extents away. In a layer, also those without a page: their pages are zero, not the base's.
    fn finish(&mut self) -> Result<(), ImageError> {
        for key in std::mem::take(&mut self.order) {
            self.give(key.0, key.1)?;
        }
        if self.writer.is_layer() && !self.only_changes {
            for block in 0..self.given.len() {
                for extent in 0..self.given[block].pages() {
                    if !self.given[block].get(extent) {
                        let zeros = vec![0; (self.pages_of(block, extent) << PAGE_SHIFT) as usize];
                        self.open.insert((block, extent), zeros);
                        self.give(block, extent)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl RecordSink for Gather<'_> {
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.counts.data.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.place(block, page)?.copy_from_slice(content);
        self.arrived(block, page, content.iter().any(|byte| *byte != 0))
    }

    fn page_at(
        &mut self,
        position: u64,
        block: usize,
        page: u64,
        content: &[u8; PAGE_SIZE],
    ) -> Result<(), ImageError> {
        self.recorder.page(position, block, page);
        self.page(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        self.counts.zero.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let extent = page / self.extent_pages;
        // An extent with zeros only needs no memory: what was not stored is zero.
        if self.only_changes || self.open.contains_key(&(block, extent)) || self.given[block].get(extent) {
            self.place(block, page)?.fill(0);
        }
        self.arrived(block, page, false)
    }

    fn zero_at(&mut self, end: u64, block: usize, page: u64) -> Result<(), ImageError> {
        self.recorder.zero(end, page);
        self.zero(block, page)
    }

    fn delta(&mut self, block: usize, page: u64, delta: &[u8]) -> Result<(), ImageError> {
        self.counts.data.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let place = self.place(block, page)?;
        let mut content = [0; PAGE_SIZE];
        content.copy_from_slice(place);
        xbzrle::apply(delta, &mut content)?;
        place.copy_from_slice(&content);
        // A delta to zeros would be no second content, but the stream's bytes are not in the image.
        self.recorder.give_up();
        self.is_live = true;
        self.arrived(block, page, content.iter().any(|byte| *byte != 0))
    }
}
