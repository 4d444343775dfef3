//! The statebank's DMA writes to guest RAM, and their log.
//!
//! While the device runs, a thread writes one page after the other. It writes its counter, and a tag of seed,
//! page and counter, to the page's beginning and end. The page of the n-th write follows from the seed and n.
//! The number of writes therefore determines the content of every page. [`Dma::verify`] checks it on the
//! other side.
//!
//! Writes are made under a lock, and a stop takes that lock. After the stop no page is written, and the log
//! contains every written page. A page's bit is set after the page was written.

mod log;
mod map;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::content::mix;
use crate::vfio_user::DmaRegion;
use crate::vfio_user::wire::DmaLogRange;
use log::Log;
use map::Map;
pub(super) use map::PAGE_BYTES;

/// Interval at which the writer checks how many writes are due.
const TURN: Duration = Duration::from_millis(1);
/// Highest number of writes while the lock is taken once.
const BATCH: u64 = 4096;

/// The DMA writer of a device.
pub struct Dma {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    inner: Mutex<Inner>,
    wake: Condvar,
}

#[derive(Default)]
struct Inner {
    maps: Vec<Map>,
    log: Option<Log>,
    plan: DmaPlan,
    writes: u64,
    runs: bool,
    quits: bool,
}

/// Where and how fast a device writes guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DmaPlan {
    /// Seed of the written addresses.
    pub seed: u64,
    /// Pages written per second.
    pub rate: u64,
    /// Guest-physical range (first, bytes). All of guest RAM if `bytes` is 0.
    pub window: (u64, u64),
}

/// A page of guest RAM does not contain its last write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest RAM at {address:#x} has write {found}, but write {expected} was the last: a write was lost")]
pub struct LostWrite {
    /// Guest-physical address of the page.
    pub address: u64,
    /// Number of the write found in the page; 0 if none.
    pub found: u64,
    /// Number of the last write to the page.
    pub expected: u64,
}

impl Dma {
    /// A writer that does not write yet.
    pub fn new(plan: DmaPlan) -> Self {
        let inner = Mutex::new(Inner { plan, ..Inner::default() });
        Self { shared: Arc::new(Shared { inner, wake: Condvar::new() }), thread: Mutex::new(None) }
    }

    /// Maps a region of guest RAM.
    ///
    /// # Errors
    /// EEXIST if it overlaps another region; EINVAL if the file is shorter; others if the system cannot map
    /// it.
    pub fn map(&self, region: &DmaRegion) -> Result<(), Errno> {
        let mut inner = self.shared.inner.lock();
        let (first, bytes) = (region.map.address, region.map.size);
        if inner.maps.iter().any(|map| map.overlaps(first, bytes)) {
            return Err(Errno::EXIST);
        }
        inner.maps.push(Map::new(region)?);
        inner.maps.sort_by_key(Map::first);
        Ok(())
    }

    /// Unmaps a region.
    ///
    /// # Errors
    /// ENOENT if there is no such region.
    pub fn unmap(&self, first: u64, bytes: u64) -> Result<(), Errno> {
        let mut inner = self.shared.inner.lock();
        let at = inner.maps.iter().position(|map| map.first() == first && map.bytes() == bytes);
        inner.maps.remove(at.ok_or(Errno::NOENT)?);
        Ok(())
    }

    /// Unmaps all regions of guest RAM.
    pub fn unmap_all(&self) {
        self.shared.inner.lock().maps.clear();
    }

    /// Starts to write pages.
    pub fn run(&self) {
        let mut inner = self.shared.inner.lock();
        inner.runs = true;
        if inner.plan.rate > 0 {
            self.start_thread();
        }
        self.shared.wake.notify_all();
    }

    /// Stops the writes. After the return, no page is written.
    pub fn stop(&self) {
        self.shared.inner.lock().runs = false;
    }

    /// The plan, and the number of writes so far.
    pub fn plan(&self) -> (DmaPlan, u64) {
        let inner = self.shared.inner.lock();
        (inner.plan, inner.writes)
    }

    /// Takes over the plan and the number of writes of a loaded device.
    pub fn become_other(&self, plan: DmaPlan, writes: u64) {
        let mut inner = self.shared.inner.lock();
        (inner.plan, inner.writes) = (plan, writes);
    }

    /// Checks that each page contains its last write. `None` if nothing was written or no page is mapped.
    pub fn verify(&self) -> Option<Result<(), LostWrite>> {
        let inner = self.shared.inner.lock();
        let pages = inner.pages();
        if inner.writes == 0 || pages == 0 {
            return None;
        }
        // Backwards: the first write found for a page is its last one, and earlier writes do not matter. The
        // time therefore depends on the number of pages, not of writes.
        let mut last = HashMap::new();
        for write in (1..=inner.writes).rev() {
            last.entry(inner.target(write, pages)).or_insert(write);
            if last.len() as u64 == pages {
                break;
            }
        }
        Some(last.into_iter().try_for_each(|(page, expected)| {
            let Some((map, address)) = inner.locate(page) else { return Ok(()) };
            let found = map.written(address, |counter| tag(inner.plan.seed, address, counter));
            if found == expected { Ok(()) } else { Err(LostWrite { address, found, expected }) }
        }))
    }

    /// Begins to log the written pages of `ranges`.
    ///
    /// # Errors
    /// EBUSY if a log is active; EINVAL for overlapping ranges; ENOMEM for too many pages.
    pub fn start_log(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), Errno> {
        let mut inner = self.shared.inner.lock();
        if inner.log.is_some() {
            return Err(Errno::BUSY);
        }
        inner.log = Some(Log::new(page_size, ranges)?);
        Ok(())
    }

    /// Stops logging and discards the logged bits.
    pub fn stop_log(&self) {
        self.shared.inner.lock().log = None;
    }

    /// Moves the logged bits of a range to `bitmap`.
    ///
    /// # Errors
    /// EINVAL if the range is not logged.
    pub fn report(&self, range: DmaLogRange, page_size: u64, bitmap: &mut [u64]) -> Result<(), Errno> {
        self.shared.inner.lock().log.as_mut().ok_or(Errno::INVAL)?.take(range, page_size, bitmap)
    }

    fn start_thread(&self) {
        let mut thread = self.thread.lock();
        if thread.is_some() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        match std::thread::Builder::new().name("statebank dma".into()).spawn(move || shared.write()) {
            Ok(started) => *thread = Some(started),
            Err(error) => tracing::error!(%error, "no thread for DMA; guest RAM is not written"),
        }
    }
}

impl Drop for Dma {
    fn drop(&mut self) {
        self.shared.inner.lock().quits = true;
        self.shared.wake.notify_all();
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a statebank's DMA panicked");
        }
    }
}

impl fmt::Debug for Dma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dma").field("plan", &self.plan()).finish_non_exhaustive()
    }
}

impl Shared {
    fn write(&self) {
        let mut began = Instant::now();
        let mut done = 0;
        let mut inner = self.inner.lock();
        while !inner.quits {
            if !inner.runs || inner.plan.rate == 0 || inner.pages() == 0 {
                self.wake.wait_for(&mut inner, TURN * 10);
                (began, done) = (Instant::now(), 0);
                continue;
            }
            let due = (began.elapsed().as_secs_f64() * inner.plan.rate as f64) as u64;
            let batch = due.saturating_sub(done).min(BATCH);
            (0..batch).for_each(|_| inner.write_one());
            done += batch;
            // Releases the lock, so that other threads wait for at most one batch.
            drop(inner);
            if batch < BATCH {
                std::thread::sleep(TURN);
            } else {
                std::thread::yield_now();
            }
            inner = self.inner.lock();
        }
    }
}

impl Inner {
    fn write_one(&mut self) {
        let pages = self.pages();
        if pages == 0 {
            return;
        }
        let write = self.writes + 1;
        let Some((map, address)) = self.locate(self.target(write, pages)) else { return };
        map.write(address, write, tag(self.plan.seed, address, write));
        if let Some(log) = &mut self.log {
            log.set(address);
        }
        self.writes = write;
    }

    /// Index of the n-th write's page, among the pages that can be written.
    fn target(&self, write: u64, pages: u64) -> u64 {
        mix(self.plan.seed ^ write) % pages
    }

    /// Number of pages that can be written.
    fn pages(&self) -> u64 {
        self.parts().map(|(_, bytes, _)| bytes / PAGE_BYTES).sum()
    }

    /// Region and address of the n-th page that can be written.
    fn locate(&self, mut page: u64) -> Option<(&Map, u64)> {
        for (first, bytes, map) in self.parts() {
            if page < bytes / PAGE_BYTES {
                return Some((map, first + page * PAGE_BYTES));
            }
            page -= bytes / PAGE_BYTES;
        }
        None
    }

    /// The mapped and writable parts of the window.
    fn parts(&self) -> impl Iterator<Item = (u64, u64, &Map)> {
        let (from, len) = if self.plan.window.1 == 0 { (0, u64::MAX) } else { self.plan.window };
        self.maps.iter().filter(|map| map.is_writable()).filter_map(move |map| {
            let first = map.first().max(from);
            let end = (map.first() + map.bytes()).min(from.saturating_add(len));
            (first < end).then(|| (first, end - first, map))
        })
    }
}

fn tag(seed: u64, address: u64, write: u64) -> u64 {
    mix(mix(seed ^ address) ^ write)
}
