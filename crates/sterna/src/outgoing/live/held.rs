//! Guest memory whose writes are held, so that it keeps the content of one moment until each page is copied.
//!
//! Before the moment, all wanted pages are protected while the guest runs: a write *opens* its page again. In the pause only
//! the pages that were opened meanwhile are protected, so that the pause does not depend on the guest's size. After the
//! moment a write waits until its pages are copied to memory of this process, at most `buffer_bytes`. The thread that sends
//! pages takes these copies first, in any order, because a stream names each page. Each page is copied once.
//!
//! A writer never waits without end. If the copies fill the limit for too long, or a thread of this module ends, the save
//! has failed and the protection is lifted.

mod bits;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::write_protection::{WriteProtection, WriteProtectionError};
use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, PinnedRam};

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::threads::{self, ThreadRole};
use bits::{gathered, runs_of};

/// Pages that one call protects while the guest runs. A longer call would delay the guest's page faults.
const SLICE_PAGES: u64 = 1024;
/// Pages that are opened, or copied for a writer, together. A guest that writes neighbouring pages then waits less often.
const GRAIN_PAGES: u64 = 16;
/// Open pages are protected again until at most this many remain for the pause.
const FEW_PAGES: u64 = 256;
/// A guest that opens pages faster than they are protected ends the passes.
const MOST_PASSES: u32 = 8;
/// Clean pages between two runs that cost less than another system call.
const GAP_PAGES: u64 = 32;

/// The held memory. Dropping it lifts the protection: no write waits any more.
pub(super) struct HeldMemory {
    held: Arc<Held>,
    server: Option<JoinHandle<()>>,
    /// Keeps the engine from giving pages back, because their content would be lost without a write.
    _pins: Vec<PinnedRam>,
}

pub(super) struct Held {
    ram: GuestRam,
    protection: WriteProtection,
    /// Pages of the image that are still in the guest's memory only.
    pending: DirtyBitmaps,
    /// Pages that were written since they were protected, before the moment.
    opened: DirtyBitmaps,
    /// Pages that the sending thread copies now.
    sending: DirtyBitmaps,
    /// Whether the moment has passed. Locked while pages are opened and protected again.
    has_passed: Mutex<bool>,
    copies: Mutex<Copies>,
    changed: Condvar,
    limit_pages: u64,
    longest: Duration,
    writes: AtomicU64,
    /// Ends waits of the sending thread after a failure.
    interrupt: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Copies {
    waiting: VecDeque<Copied>,
    pages: u64,
    /// No writer waits any more.
    is_over: bool,
    error: Option<MigrationError>,
}

/// The content of pages at the moment.
pub(super) struct Copied {
    pub(super) run: PageRun,
    pub(super) content: Vec<u8>,
}

impl HeldMemory {
    /// Registers the memory of `ram`. No page is protected yet. `interrupt` is called if writes cannot be held any more.
    pub(super) fn begin(
        ram: &GuestRam,
        (buffer_bytes, longest): (u64, Duration),
        interrupt: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, MigrationError> {
        let protection = WriteProtection::new(ram).map_err(failed)?;
        let held = Arc::new(Held {
            pending: DirtyBitmaps::new(ram),
            opened: DirtyBitmaps::new(ram),
            sending: DirtyBitmaps::new(ram),
            ram: ram.clone(),
            protection,
            has_passed: Mutex::new(false),
            copies: Mutex::default(),
            changed: Condvar::new(),
            limit_pages: (buffer_bytes / PAGE_SIZE as u64).max(GRAIN_PAGES),
            longest,
            writes: AtomicU64::new(0),
            interrupt: Box::new(interrupt),
        });
        let pin = |block: &sterna_ram::RamBlock| block.pin(0, block.len_bytes());
        let pins = ram.blocks().iter().map(pin).collect::<Result<Vec<_>, _>>()?;
        let [serving, dying] = [0, 1].map(|_| Arc::clone(&held));
        let server = threads::spawn(
            ThreadRole::HeldWrites,
            move || serving.serve(),
            move |error| dying.abandon(error),
        )?;
        Ok(Self { held, server: Some(server), _pins: pins })
    }

    pub(super) fn held(&self) -> &Arc<Held> {
        &self.held
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        self.held.copies.lock().is_over = true;
        self.held.changed.notify_all();
        self.held.protection.stop_serving();
        if let Some(server) = self.server.take() {
            // A thread that panicked has reported its error.
            let _ = server.join();
        }
        self.held.protection.lift();
    }
}

impl Held {
    /// Refuses memory that can neither be protected nor be copied in the pause.
    pub(super) fn check(&self) -> Result<(), MigrationError> {
        let unprotected = |(index, block): (usize, &sterna_ram::RamBlock)| {
            (!self.protection.covers(index)).then(|| block.pages())
        };
        let pages: u64 = self.ram.blocks().iter().enumerate().filter_map(unprotected).sum();
        match self.protection.refused().next() {
            Some(why) if pages > self.limit_pages => {
                let what = format!(
                    "{why}; {pages} pages would be copied while the guest is paused: save the guest without --live"
                );
                Err(MigrationError::System(what, None))
            }
            _ => Ok(()),
        }
    }

    /// Protects `pages` while the guest runs, until few of them are open.
    pub(super) fn protect_ahead(
        &self,
        pages: &DirtyBitmaps,
        mut check: impl FnMut() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        for run in self.coverable(pages) {
            let mut first = run.first;
            while first < run.end() {
                check()?;
                let count = SLICE_PAGES.min(run.end() - first);
                self.protect(PageRun { first, count, ..run })?;
                first += count;
            }
        }
        for _ in 0..MOST_PASSES {
            if self.opened.count() <= FEW_PAGES {
                break;
            }
            for run in self.coverable(&self.opened) {
                check()?;
                let _opens_none = self.has_passed.lock();
                self.opened.block(run.block).clear_range(run.first, run.count);
                self.protect(run)?;
            }
        }
        self.failure()
    }

    /// The moment: the guest is paused, and `pages` keep their present content until they are copied.
    ///
    /// Each of `pages` was given to [`protect_ahead`](Self::protect_ahead), or is in `late`.
    pub(super) fn hold(
        &self,
        pages: &DirtyBitmaps,
        late: Option<&DirtyBitmaps>,
    ) -> Result<(), MigrationError> {
        let mut has_passed = self.has_passed.lock();
        for bits in [Some(&self.opened), late].into_iter().flatten() {
            for run in gathered(self.coverable(bits), GAP_PAGES) {
                self.protect(run)?;
            }
        }
        for run in runs_of(pages) {
            match self.protection.covers(run.block) {
                true => {
                    self.pending.block(run.block).set_range(run.first, run.count);
                }
                false => self.copy(run)?,
            }
        }
        *has_passed = true;
        Ok(())
    }

    /// Takes the first pages of `run` that no writer has taken. [`sent`](Self::sent) must follow their copy.
    pub(super) fn send(&self, run: PageRun) -> Option<PageRun> {
        let pending = self.pending.block(run.block).next_run(run.first, run.end(), run.count)?;
        // First the mark: a writer that finds a page neither pending nor marked continues.
        let sending = self.sending.block(run.block);
        sending.set_range(pending.first, pending.count);
        let taken = self.take(PageRun { first: pending.first, count: pending.count, ..run });
        let (first, count) = taken.map_or((0, 0), |taken| (taken.first, taken.count));
        for page in (pending.first..pending.end()).filter(|page| !(first..first + count).contains(page)) {
            sending.clear(page);
        }
        // A writer took some of these pages meanwhile.
        taken.or_else(|| self.send(PageRun { first: pending.end(), count: run.end() - pending.end(), ..run }))
    }

    /// Lets writers of pages from [`send`](Self::send) continue, after they are copied.
    pub(super) fn sent(&self, run: PageRun) -> Result<(), MigrationError> {
        let released = self.protection.release(run.block, run.first, run.count);
        self.sending.block(run.block).clear_range(run.first, run.count);
        released.map_err(|error| {
            let error = failed(error);
            self.abandon(error.clone());
            error
        })
    }

    fn take(&self, run: PageRun) -> Option<PageRun> {
        let taken = self.pending.block(run.block).take_run(run.first, run.end(), run.count)?;
        Some(PageRun { block: run.block, first: taken.first, count: taken.count })
    }

    /// The oldest copy that was made for a writer.
    pub(super) fn take_copy(&self) -> Option<Copied> {
        let mut copies = self.copies.lock();
        let copied = copies.waiting.pop_front()?;
        copies.pages -= copied.run.count;
        drop(copies);
        self.changed.notify_all();
        Some(copied)
    }

    /// Waits a short time for a copy, which a writer's thread makes now.
    pub(super) fn await_copy(&self) {
        let mut copies = self.copies.lock();
        if copies.waiting.is_empty() && copies.error.is_none() {
            self.changed.wait_for(&mut copies, Duration::from_millis(20));
        }
    }

    /// The error that ended the protection: pages that were read since then may have newer content.
    pub(super) fn failure(&self) -> Result<(), MigrationError> {
        self.copies.lock().error.clone().map_or(Ok(()), Err)
    }

    /// Number of writes that had to wait for a copy.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    fn serve(&self) {
        let served = self.protection.serve(|block, page| {
            if let Err(error) = self.writes_to(block, page) {
                self.abandon(error);
            }
        });
        if let Err(error) = served {
            self.abandon(failed(error));
        }
    }

    /// Lets a writer of this page continue, after its content is copied.
    fn writes_to(&self, block: usize, page: u64) -> Result<(), MigrationError> {
        let first = page / GRAIN_PAGES * GRAIN_PAGES;
        let count = GRAIN_PAGES.min(self.ram.block(block).pages() - first);
        let grain = PageRun { block, first, count };
        {
            let has_passed = self.has_passed.lock();
            if !*has_passed {
                self.opened.block(block).set_range(first, count);
                return self.protection.release(block, first, count).map_err(failed);
            }
        }
        self.writes.fetch_add(1, Ordering::Relaxed);
        if !self.await_room()? {
            return Ok(());
        }
        while let Some(taken) = self.take(grain) {
            self.copy(taken)?;
            self.protection.release(block, taken.first, taken.count).map_err(failed)?;
        }
        // The sender releases what it copies now. A page of no image, or one that was copied, is released here.
        match self.sending.block(block).get(page) {
            true => Ok(()),
            false => self.protection.release(block, page, 1).map_err(failed),
        }
    }

    /// Waits until another copy fits the limit. False: no writer waits any more.
    fn await_room(&self) -> Result<bool, MigrationError> {
        let began = Instant::now();
        let mut copies = self.copies.lock();
        while !copies.is_over && copies.pages + GRAIN_PAGES > self.limit_pages {
            let Some(left) = self.longest.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) else {
                let buffer_bytes = self.limit_pages * PAGE_SIZE as u64;
                return Err(MigrationError::HeldTooLong { after: self.longest, buffer_bytes });
            };
            self.changed.wait_for(&mut copies, left);
        }
        Ok(!copies.is_over)
    }

    /// Copies pages that this thread has taken, or that the pause keeps unchanged.
    fn copy(&self, run: PageRun) -> Result<(), MigrationError> {
        let mut content = vec![0; run.count as usize * PAGE_SIZE];
        let block = self.ram.block(run.block);
        block.slice(run.first * PAGE_SIZE as u64, content.len())?.copy_to(&mut content)?;
        let mut copies = self.copies.lock();
        copies.pages += run.count;
        copies.waiting.push_back(Copied { run, content });
        drop(copies);
        self.changed.notify_all();
        Ok(())
    }

    fn protect(&self, run: PageRun) -> Result<(), MigrationError> {
        self.protection.protect(run.block, run.first, run.count).map_err(failed)
    }

    /// The runs of `pages` in memory that can be protected.
    fn coverable(&self, pages: &DirtyBitmaps) -> Vec<PageRun> {
        runs_of(pages).filter(|run| self.protection.covers(run.block)).collect()
    }

    /// Gives the save up, and lets all writers continue.
    fn abandon(&self, error: MigrationError) {
        {
            // The error is known before a page can change.
            let mut copies = self.copies.lock();
            copies.error.get_or_insert(error);
            copies.is_over = true;
        }
        self.changed.notify_all();
        self.protection.lift();
        (self.interrupt)();
    }
}

fn failed(error: WriteProtectionError) -> MigrationError {
    MigrationError::system(error.to_string(), error)
}
