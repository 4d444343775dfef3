//! When lanes may take pages, and for what.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::MigrationError;

/// What pages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// RAM: nothing is held yet that they could harm.
    Seeding,
    /// Nothing: they wait for the next checkpoint.
    Closed,
    /// The journal.
    Open,
    /// Nobody waits any more.
    Ended,
}

/// Stands before every page.
pub(super) struct Gate {
    phase: Mutex<Phase>,
    /// How often it was open.
    opened: AtomicU64,
    changed: Condvar,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { phase: Mutex::new(Phase::Seeding), opened: AtomicU64::new(0), changed: Condvar::new() }
    }

    /// From now on pages are for that. [`Phase::Ended`] is for ever.
    pub(super) fn set(&self, to: Phase) {
        let mut phase = self.phase.lock();
        if *phase != Phase::Ended {
            if to == Phase::Open {
                self.opened.fetch_add(1, Ordering::AcqRel);
            }
            *phase = to;
        }
        drop(phase);
        self.changed.notify_all();
    }

    /// Waits until pages may come. True: they are for the journal.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`]: they are for nothing any more.
    pub(super) fn enter(&self) -> Result<bool, MigrationError> {
        let mut phase = self.phase.lock();
        loop {
            match *phase {
                Phase::Seeding => return Ok(false),
                Phase::Open => return Ok(true),
                Phase::Ended => return Err(MigrationError::Cancelled),
                Phase::Closed => self.changed.wait(&mut phase),
            }
        }
    }

    /// The checkpoint that arrives, or arrived last; the first is 1.
    pub(super) fn checkpoint(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    /// Whether pages that came are in the journal.
    pub(super) fn is_past_seeding(&self) -> bool {
        *self.phase.lock() != Phase::Seeding
    }

    /// Waits until all is over, no longer than `most`. True: it is.
    pub(super) fn wait_for_end(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut phase = self.phase.lock();
        while *phase != Phase::Ended {
            if self.changed.wait_until(&mut phase, until).timed_out() {
                return *phase == Phase::Ended;
            }
        }
        true
    }
}
