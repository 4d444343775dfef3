//! How fast a guest dirties its memory, measured without migrating it (QEMU's `calc-dirty-rate`).
//!
//! Tracking begins, every page is armed, some time passes, and one sync counts the distinct pages that were
//! written meanwhile. A dirty log has one owner, so a measurement and a migration exclude each other; a
//! measurement leaves the log as it was.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::{DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, TrackingClaim};

use crate::error::MigrationError;
use crate::start_error::StartError;
use crate::threads::{self, call, tried};
use crate::throttle::Throttle;
use crate::vm::SourceVm;

/// Pages re-armed by one call: 1 GiB, so that a kernel's lock is not held for long.
const SLICE_PAGES: u64 = (1 << 30) / PAGE_SIZE as u64;

/// A shorter interval says nothing.
const SHORTEST: Duration = Duration::from_millis(50);

/// What was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirtyReading {
    /// From arming the pages to the sync.
    pub interval: Duration,
    /// Pages that were written at least once meanwhile.
    pub dirty_pages: u64,
    /// Pages that were ever written or read since the VM began; the others are zero and cost a migration nothing.
    pub touched_pages: u64,
    /// How long the sync took.
    pub sync: Duration,
    /// What each vCPU dirtied, over the last second of the interval or so; empty where the VM does not count it.
    pub vcpu_bytes_per_second: Vec<u64>,
}

impl DirtyReading {
    /// Bytes of distinct pages per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.dirty_bytes() as f64 / self.interval.as_secs_f64().max(1e-9)
    }

    /// Bytes of the pages that were written.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_pages * PAGE_SIZE as u64
    }
}

/// Where a measurement stands.
#[derive(Debug, Clone)]
pub enum MeasuringState {
    /// It runs.
    Measuring,
    /// It has ended.
    Measured(DirtyReading),
    /// It was cancelled, or tracking failed.
    Failed(MigrationError),
}

/// A measurement in a thread of its own. Dropping the handle cancels it.
#[derive(Debug)]
pub struct DirtyRateMeasurement {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    state: MeasuringState,
    is_cancelled: bool,
    /// Somebody else needs the log: what was counted so far is the result.
    is_finished: bool,
}

impl DirtyRateMeasurement {
    /// Begins to measure over `interval`. Returns at once.
    ///
    /// # Errors
    /// [`StartError::Tracked`] while a migration or another measurement tracks the guest's writes, and while a guest is
    /// held.
    pub fn start(vm: Arc<dyn SourceVm>, interval: Duration) -> Result<Self, StartError> {
        let ram = vm.ram();
        let claim = ram.claim_tracking().ok_or(StartError::Tracked)?;
        let progress = Progress { state: MeasuringState::Measuring, is_cancelled: false, is_finished: false };
        let shared = Arc::new(Shared { progress: Mutex::new(progress), changed: Condvar::new() });
        let its = Arc::clone(&shared);
        let died = {
            let shared = Arc::clone(&shared);
            move |error| shared.end(Err(error))
        };
        threads::spawn("dirty-rate", move || its.measure((&*vm, &ram), interval, claim), died)
            .map_err(|error| StartError::System(error.to_string()))?;
        Ok(Self { shared })
    }

    /// Where it stands.
    pub fn state(&self) -> MeasuringState {
        self.shared.progress.lock().state.clone()
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        matches!(self.shared.progress.lock().state, MeasuringState::Measuring)
    }

    /// Ends it without a result; nothing is tracked any more when this returns.
    pub fn cancel(&self) {
        self.shared.progress.lock().is_cancelled = true;
        self.shared.changed.notify_all();
        // Cancelled or, just before, measured: both are ends.
        let _ = self.wait();
    }

    /// Ends it with what was counted until now, but not before [`SHORTEST`] has passed; nothing is tracked any more when
    /// this returns.
    pub fn finish(&self) {
        self.shared.progress.lock().is_finished = true;
        self.shared.changed.notify_all();
        // Whatever came of it, it has ended.
        let _ = self.wait();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`], or why tracking failed.
    pub fn wait(&self) -> Result<DirtyReading, MigrationError> {
        let mut progress = self.shared.progress.lock();
        loop {
            match &progress.state {
                MeasuringState::Measuring => self.shared.changed.wait(&mut progress),
                MeasuringState::Measured(reading) => return Ok(reading.clone()),
                MeasuringState::Failed(error) => return Err(error.clone()),
            }
        }
    }
}

impl Drop for DirtyRateMeasurement {
    fn drop(&mut self) {
        self.shared.progress.lock().is_cancelled = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The thread. The claim goes before the end is told, so that whoever waited may migrate at once.
    fn measure(&self, guest: (&dyn SourceVm, &GuestRam), interval: Duration, claim: TrackingClaim) {
        let result = self.count(guest, interval);
        drop(claim);
        self.end(result);
    }

    fn end(&self, result: Result<DirtyReading, MigrationError>) {
        self.progress.lock().state = match result {
            Ok(reading) => MeasuringState::Measured(reading),
            Err(error) => MeasuringState::Failed(error),
        };
        self.changed.notify_all();
    }

    fn count(
        &self,
        (vm, ram): (&dyn SourceVm, &GuestRam),
        interval: Duration,
    ) -> Result<DirtyReading, MigrationError> {
        let source = vm.dirty_source();
        call("DirtySource::start", || source.start())?;
        let counting = || {
            self.count_started(ram, source, interval).map(|reading| {
                // Nobody counts any more once tracking has ended.
                let vcpus = vm.throttle().map(Throttle::vcpu_dirty_rates).unwrap_or_default();
                DirtyReading {
                    vcpu_bytes_per_second: vcpus.iter().map(|vcpu| vcpu.rate_bytes).collect(),
                    ..reading
                }
            })
        };
        let counted = tried("a callback of the VMM while its dirty rate was measured", counting);
        // Whatever was counted, a log that cannot be stopped is what must be heard of.
        call("DirtySource::stop", || source.stop())?;
        counted
    }

    fn count_started(
        &self,
        ram: &GuestRam,
        source: &dyn DirtySource,
        interval: Duration,
    ) -> Result<DirtyReading, MigrationError> {
        let mut dirty = DirtyBitmaps::new(ram);
        let (began, _) = timed(|| {
            if source.initially_set() {
                dirty.set_all();
            } else {
                source.sync(&mut dirty)?;
            }
            rearm(ram, source, &dirty)
        })?;
        dirty.clear_all();
        // Pages were armed one after the other: on average in the middle of that.
        let armed = began + began.elapsed() / 2;
        self.sleep(SHORTEST.min(interval).saturating_sub(armed.elapsed()), |progress| progress.is_cancelled)?;
        let may_end = |progress: &Progress| progress.is_cancelled || progress.is_finished;
        self.sleep(interval.saturating_sub(armed.elapsed()), may_end)?;
        let (began, _) = timed(|| source.sync(&mut dirty).map_err(MigrationError::from))?;
        let sync = began.elapsed();
        Ok(DirtyReading {
            interval: (began + sync / 2).saturating_duration_since(armed),
            dirty_pages: dirty.count(),
            touched_pages: touched(ram, source)?,
            sync,
            vcpu_bytes_per_second: Vec::new(),
        })
    }

    /// Waits for `time`, or until `may_end`.
    fn sleep(&self, time: Duration, may_end: impl Fn(&Progress) -> bool) -> Result<(), MigrationError> {
        let mut progress = self.progress.lock();
        self.changed.wait_while_for(&mut progress, |progress| !may_end(progress), time);
        if progress.is_cancelled { Err(MigrationError::Cancelled) } else { Ok(()) }
    }
}

/// Does it, and says when it began.
fn timed<T>(act: impl FnOnce() -> Result<T, MigrationError>) -> Result<(Instant, T), MigrationError> {
    let began = Instant::now();
    act().map(|done| (began, done))
}

fn rearm(ram: &GuestRam, source: &dyn DirtySource, synced: &DirtyBitmaps) -> Result<(), MigrationError> {
    for (block, its) in ram.blocks().iter().enumerate() {
        for first in (0..its.pages()).step_by(SLICE_PAGES as usize) {
            let count = SLICE_PAGES.min(its.pages() - first);
            source.rearm(block, first, count, synced.block(block))?;
        }
    }
    Ok(())
}

fn touched(ram: &GuestRam, source: &dyn DirtySource) -> Result<u64, MigrationError> {
    let mut pages = 0;
    for (block, its) in ram.blocks().iter().enumerate() {
        let absent = PageBitmap::new(its.pages());
        source.mark_absent(ram, block, 0, its.pages(), &absent)?;
        pages += its.pages() - absent.count();
    }
    Ok(pages)
}
