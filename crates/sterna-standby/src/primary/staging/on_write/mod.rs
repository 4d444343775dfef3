//! Copy-on-write: protects dirty pages in a checkpoint's pause, and copies them later.
//!
//! A page is copied in order by a thread, before a lane sends it, or when the guest writes it. In the last case
//! the writer blocks until the page is copied. Therefore a guest that writes faster than pages are copied is
//! slowed down, and no content is lost. No writer blocks without end: if a thread of this module or the
//! protection ends, the remaining pages are copied and all writers are unblocked.

mod cost;
mod deferred;
mod spans;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna::internals::threads::{self, ThreadRole};
use sterna_ram::write_protection::WriteProtection;
use sterna_ram::{GuestRam, RamBlock};

pub(crate) use cost::{Costs, Runs};
pub(super) use deferred::Deferred;
use spans::{extent, spans};

use super::pieces::Piece;

/// Copies the pages of a checkpoint while the guest runs. Dropping it copies the rest and unblocks all writers.
pub(super) struct CopyOnWrite {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    protection: Arc<WriteProtection>,
    work: Mutex<Work>,
    is_work: Condvar,
    /// Locked while a blocked writer is served. A writer that blocked in the last checkpoint must not be
    /// unblocked in the next one, where its page may be protected again.
    serving: Mutex<()>,
    /// The number of writes that were blocked.
    held: AtomicU64,
}

#[derive(Default)]
struct Work {
    /// The pages of the last protection.
    deferred: Option<Arc<Deferred>>,
    /// The guest has resumed: the pages are to be copied now.
    goes_on: bool,
    ends: bool,
    /// The error because of which no thread serves writers any more.
    broken: Option<MigrationError>,
}

impl CopyOnWrite {
    /// Creates the write protection and starts the two threads.
    ///
    /// # Errors
    /// The host or this guest's memory does not support write protection, or a thread could not be started.
    pub(super) fn begin(ram: &GuestRam) -> Result<Self, MigrationError> {
        let protection =
            WriteProtection::new(ram).map_err(|why| MigrationError::system(why.to_string(), why))?;
        let shared = Arc::new(Shared {
            protection: Arc::new(protection),
            work: Mutex::default(),
            is_work: Condvar::new(),
            serving: Mutex::default(),
            held: AtomicU64::new(0),
        });
        // If the other thread cannot be started, dropping `this` ends the first one.
        let mut this = Self { shared, threads: Vec::new() };
        this.spawn(ThreadRole::HeldWrites, Shared::serve)?;
        this.spawn(ThreadRole::CheckpointCopier, Shared::copy_in_order)?;
        Ok(this)
    }

    fn spawn(
        &mut self,
        role: ThreadRole,
        act: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), MigrationError> {
        let [shared, dying] = [0, 1].map(|_| Arc::clone(&self.shared));
        let thread = threads::spawn(role, move || act(&shared), move |error| dying.abandon(error))?;
        self.threads.push(thread);
        Ok(())
    }

    /// For each block that cannot be write-protected, the reason.
    ///
    /// Its pages are copied during the pause.
    pub(super) fn refused(&self) -> Vec<String> {
        self.shared.protection.refused().map(ToString::to_string).collect()
    }

    /// Whether pages of this block can be protected and copied later.
    pub(super) fn covers(&self, block: usize) -> bool {
        self.shared.protection.covers(block)
    }

    /// The error because of which copy-on-write cannot be used any more.
    pub(super) fn broken(&self) -> Option<MigrationError> {
        self.shared.work.lock().broken.clone()
    }

    /// The number of writes that were blocked so far.
    pub(super) fn held(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// The spans to protect for these pieces, and their extent.
    ///
    /// There are at most `gap` clean pages between two pieces of a span.
    pub(super) fn spans(&self, pieces: &[Piece], gap: u64) -> (Vec<PageRun>, Runs) {
        let spans = spans(pieces.iter().copied().filter(|piece| self.covers(piece.run.block)), gap);
        let extent = extent(&spans);
        (spans, extent)
    }

    /// Protects pages whose present content is copied to their places later.
    ///
    /// The guest is paused, and earlier pages are [settled](CopyOnWrite::settle). `spans` are the spans of these
    /// pieces. If the kernel refuses, the pages are copied when this call returns.
    pub(super) fn defer(
        &self,
        (ram, arena): (&GuestRam, &RamBlock),
        pieces: Arc<[Piece]>,
        spans: &[PageRun],
    ) -> Result<Arc<Deferred>, MigrationError> {
        let protection = &self.shared.protection;
        let deferred = Arc::new(Deferred::new((ram, arena), pieces, spans, protection)?);
        {
            // This comes before the first page is protected: the thread that serves its writer needs `deferred`.
            let _none_is_served = self.shared.serving.lock();
            let mut work = self.shared.work.lock();
            (work.deferred, work.goes_on) = (Some(Arc::clone(&deferred)), false);
        }
        let protected =
            spans.iter().try_for_each(|span| protection.protect(span.block, span.first, span.count));
        if let Err(error) = protected {
            // The guest is paused: the pages still have the content of the checkpoint.
            deferred.finish_all()?;
            self.shared.abandon(MigrationError::system(error.to_string(), error));
        }
        Ok(deferred)
    }

    /// Call it when the guest resumes. Starts the copying.
    pub(super) fn go_on(&self) {
        self.shared.work.lock().goes_on = true;
        self.shared.is_work.notify_one();
    }

    /// Copies all remaining pages. Afterwards no page waits for its copy.
    pub(super) fn settle(&self) {
        self.shared.settle();
    }
}

impl Drop for CopyOnWrite {
    fn drop(&mut self) {
        self.shared.settle();
        self.shared.work.lock().ends = true;
        self.shared.is_work.notify_all();
        self.shared.protection.stop_serving();
        for thread in self.threads.drain(..) {
            // A thread that panicked has already reported the error.
            let _ = thread.join();
        }
        self.shared.protection.lift();
    }
}

impl Shared {
    fn serve(&self) {
        let served = self.protection.serve(|block, page| {
            self.held.fetch_add(1, Ordering::Relaxed);
            let _serving = self.serving.lock();
            let deferred = self.work.lock().deferred.clone();
            match deferred {
                Some(deferred) => deferred.let_through(block, page),
                // All pages are copied.
                None => {
                    if self.protection.release(block, page, 1).is_err() {
                        self.protection.lift();
                    }
                }
            }
        });
        if let Err(error) = served {
            self.abandon(MigrationError::system(error.to_string(), error));
        }
    }

    fn copy_in_order(&self) {
        loop {
            let mut work = self.work.lock();
            while !work.goes_on && !work.ends {
                self.is_work.wait(&mut work);
            }
            if work.ends {
                return;
            }
            work.goes_on = false;
            let deferred = work.deferred.clone();
            drop(work);
            if let Some(deferred) = deferred {
                // A thread that needs a page that could not be copied gets the error from there.
                let _ = deferred.finish_all();
            }
        }
    }

    fn settle(&self) {
        let deferred = self.work.lock().deferred.clone();
        if let Some(deferred) = deferred {
            if !deferred.is_finished() {
                let _ = deferred.finish_all();
            }
            let mut work = self.work.lock();
            if work.deferred.as_ref().is_some_and(|now| Arc::ptr_eq(now, &deferred)) {
                work.deferred = None;
            }
        }
    }

    /// Ends the service of writers: copies all remaining pages, then unblocks all writers.
    fn abandon(&self, why: MigrationError) {
        self.work.lock().broken.get_or_insert(why);
        self.settle();
        self.protection.lift();
    }
}

#[cfg(test)]
mod tests;
