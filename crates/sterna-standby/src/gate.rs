//! Controls when lanes may deliver pages, and whether the pages go to RAM or to the journal.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna::error::MigrationError;

/// Destination of the pages that lanes deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Pages go to RAM. No checkpoint is held yet that they could damage.
    Seeding,
    /// Pages wait for the next checkpoint.
    Closed,
    /// Pages go to the journal.
    Open,
    /// The reception has ended; pages are refused.
    Ended,
}

/// Every lane passes this gate before it delivers a page.
pub(super) struct Gate {
    phase: Mutex<Phase>,
    /// How often the gate was opened: once per checkpoint.
    opened: AtomicU64,
    changed: Condvar,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { phase: Mutex::new(Phase::Seeding), opened: AtomicU64::new(0), changed: Condvar::new() }
    }

    /// Changes the phase. [`Phase::Ended`] is final.
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

    /// Waits until lanes may deliver pages. Returns true if the pages go to the journal.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`] after the end.
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

    /// Number of the checkpoint that arrives, or arrived last; the first is 1.
    pub(super) fn checkpoint(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    /// Whether delivered pages went to the journal, not to RAM.
    pub(super) fn is_past_seeding(&self) -> bool {
        *self.phase.lock() != Phase::Seeding
    }

    /// Waits for the end, at most `most`. Returns whether the end is reached.
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
