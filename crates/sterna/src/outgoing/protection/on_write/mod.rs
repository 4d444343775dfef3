//! Copy-on-write: the dirty pages of a checkpoint are protected while the guest stands, and copied when it goes on.
//!
//! A page is copied in its turn, or when a lane is to send it, or when the guest writes it: then the writer waits for the copy. So a
//! guest that writes faster than is copied is slowed down and loses nothing. Nobody waits for ever: whatever ends the threads
//! here, or the protection, copies what is left and lets all writers through.

mod cost;
mod deferred;
mod spans;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use sterna_ram::write_protection::WriteProtection;
use sterna_ram::{GuestRam, RamBlock};

pub(crate) use cost::{Costs, Runs};
pub(super) use deferred::Deferred;
use spans::{extent, spans};

use super::pieces::Piece;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::threads;

/// Lets the guest go on while the pages of a checkpoint are copied. Dropping it copies what is left, and lets everybody through.
pub(super) struct CopyOnWrite {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    protection: Arc<WriteProtection>,
    work: Mutex<Work>,
    is_work: Condvar,
    /// Held while a writer is served: one that was held in the last checkpoint must not be let through in the next, where its page may
    /// be protected again.
    serving: Mutex<()>,
    /// Writes that were held.
    held: AtomicU64,
}

#[derive(Default)]
struct Work {
    /// The pages that were protected last.
    deferred: Option<Arc<Deferred>>,
    /// They are to be copied now.
    goes_on: bool,
    ends: bool,
    /// Why no thread serves any more.
    broken: Option<MigrationError>,
}

impl CopyOnWrite {
    /// Gets ready.
    ///
    /// # Errors
    /// Why this host, or this guest's memory, has no such thing; or why a thread is not to be had.
    pub(super) fn begin(ram: &GuestRam) -> Result<Self, MigrationError> {
        let protection = WriteProtection::new(ram).map_err(|why| MigrationError::System(why.to_string()))?;
        let shared = Arc::new(Shared {
            protection: Arc::new(protection),
            work: Mutex::default(),
            is_work: Condvar::new(),
            serving: Mutex::default(),
            held: AtomicU64::new(0),
        });
        // What has begun ends with this, should the other thread not be had.
        let mut this = Self { shared, threads: Vec::new() };
        this.spawn("held writes", Shared::serve)?;
        this.spawn("checkpoint copier", Shared::copy_in_order)?;
        Ok(this)
    }

    fn spawn(
        &mut self,
        name: &str,
        act: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), MigrationError> {
        let [shared, dying] = [0, 1].map(|_| Arc::clone(&self.shared));
        let thread = threads::spawn(name, move || act(&shared), move |error| dying.abandon(error))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Why pages of some blocks have to be copied at once.
    pub(super) fn refused(&self) -> Vec<String> {
        self.shared.protection.refused().map(ToString::to_string).collect()
    }

    /// Whether pages of this block can wait for their copy.
    pub(super) fn covers(&self, block: usize) -> bool {
        self.shared.protection.covers(block)
    }

    /// Why it cannot be used any more.
    pub(super) fn broken(&self) -> Option<MigrationError> {
        self.shared.work.lock().broken.clone()
    }

    /// Writes that were held so far.
    pub(super) fn held(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// The runs to protect so that these pieces can wait, with clean pages between them of at most `gap`.
    pub(super) fn spans(&self, pieces: &[Piece], gap: u64) -> (Vec<PageRun>, Runs) {
        let spans = spans(pieces.iter().copied().filter(|piece| self.covers(piece.run.block)), gap);
        let extent = extent(&spans);
        (spans, extent)
    }

    /// Protects pages: they are copied to their places later, as they are now. The guest stands, and earlier ones are
    /// [settled](CopyOnWrite::settle). `spans` are those of these pieces.
    ///
    /// Should the kernel refuse, they are copied when this returns.
    pub(super) fn defer(
        &self,
        (ram, arena): (&GuestRam, &RamBlock),
        pieces: Arc<[Piece]>,
        spans: &[PageRun],
    ) -> Result<Arc<Deferred>, MigrationError> {
        let protection = &self.shared.protection;
        let deferred = Arc::new(Deferred::new((ram, arena), pieces, spans, protection)?);
        {
            // Before the first is protected: whoever serves its writer has to know it.
            let _none_is_served = self.shared.serving.lock();
            let mut work = self.shared.work.lock();
            (work.deferred, work.goes_on) = (Some(Arc::clone(&deferred)), false);
        }
        let protected =
            spans.iter().try_for_each(|span| protection.protect(span.block, span.first, span.count));
        if let Err(error) = protected {
            // The guest stands: what is copied now is what is to be copied.
            deferred.finish_all()?;
            self.shared.abandon(MigrationError::System(error.to_string()));
        }
        Ok(deferred)
    }

    /// The guest goes on: the copying begins.
    pub(super) fn go_on(&self) {
        self.shared.work.lock().goes_on = true;
        self.shared.is_work.notify_one();
    }

    /// Copies what is left. Afterwards nothing is to be copied any more.
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
            // One that panicked has said so.
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
                // All was copied.
                None => {
                    if self.protection.release(block, page, 1).is_err() {
                        self.protection.lift();
                    }
                }
            }
        });
        if let Err(error) = served {
            self.abandon(MigrationError::System(error.to_string()));
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
                // Whoever needs what could not be copied learns why.
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

    /// Nobody serves writers any more: what is left is copied, then they all go on.
    fn abandon(&self, why: MigrationError) {
        self.work.lock().broken.get_or_insert(why);
        self.settle();
        self.protection.lift();
    }
}

#[cfg(test)]
mod tests;
