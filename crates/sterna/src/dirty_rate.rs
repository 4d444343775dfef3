//! Measures a guest's dirty rate without migrating the guest (QEMU's `calc-dirty-rate`).
//!
//! A measurement starts tracking, arms every page, waits for the interval, and counts the written pages with one
//! sync. A dirty log has one owner, so a measurement and a migration exclude each other. A measurement leaves the log
//! as it was.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::{DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, TrackingClaim};

use crate::error::MigrationError;
use crate::start_error::StartError;
use crate::threads::{self, OnThreadStart, ThreadRole, call, hooked, tried};
use crate::throttle::Throttle;
use crate::vm::SourceVm;

/// Pages re-armed by one call: 1 GiB, so that the kernel does not hold its lock for long.
const SLICE_PAGES: u64 = (1 << 30) / PAGE_SIZE as u64;

/// The shortest interval. The error of a shorter measurement would be too large.
const SHORTEST: Duration = Duration::from_millis(50);

/// Result of one measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirtyReading {
    /// Time from arming the pages to the sync.
    pub interval: Duration,
    /// Pages that were written at least once during the interval.
    pub dirty_pages: u64,
    /// Pages that were written or read at least once since the VM started. The others are zero and cost a migration
    /// nothing.
    pub touched_pages: u64,
    /// Duration of the sync.
    pub sync: Duration,
    /// Dirty rate of each vCPU, over about the last second of the interval. Empty if the VM does not count it.
    pub vcpu_bytes_per_second: Vec<u64>,
}

impl DirtyReading {
    /// Dirty rate of the guest: bytes of distinct pages per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.dirty_bytes() as f64 / self.interval.as_secs_f64().max(1e-9)
    }

    /// Bytes of the written pages.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_pages * PAGE_SIZE as u64
    }
}

/// Progress of a measurement.
#[derive(Debug, Clone)]
pub enum MeasuringState {
    /// The measurement runs.
    Measuring,
    /// The measurement has ended, with this result.
    Measured(DirtyReading),
    /// The measurement was cancelled, or tracking failed.
    Failed(MigrationError),
}

/// A measurement, which runs in its own thread. Dropping the handle cancels it.
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
    /// A migration needs the log: the pages counted so far are the result.
    is_finished: bool,
}

impl DirtyRateMeasurement {
    /// Starts a measurement over `interval`. Returns immediately.
    ///
    /// # Errors
    /// [`StartError::Tracked`] if a migration or another measurement tracks the guest's writes, or if a guest is
    /// held.
    pub fn start(vm: Arc<dyn SourceVm>, interval: Duration) -> Result<Self, StartError> {
        Self::start_with(vm, interval, None)
    }

    /// As [`DirtyRateMeasurement::start`], with a hook that runs first on the measurement's threads
    /// ([`Parameters::on_thread_start`](crate::Parameters::on_thread_start)).
    ///
    /// # Errors
    /// As [`DirtyRateMeasurement::start`].
    pub fn start_with(
        vm: Arc<dyn SourceVm>,
        interval: Duration,
        on_thread_start: Option<OnThreadStart>,
    ) -> Result<Self, StartError> {
        let ram = vm.ram();
        let claim = ram.claim_tracking().ok_or(StartError::Tracked)?;
        let progress = Progress { state: MeasuringState::Measuring, is_cancelled: false, is_finished: false };
        let shared = Arc::new(Shared { progress: Mutex::new(progress), changed: Condvar::new() });
        let its = Arc::clone(&shared);
        let died = {
            let shared = Arc::clone(&shared);
            move |error| shared.end(Err(error))
        };
        let measure = move || its.measure((&*vm, &ram), interval, claim);
        hooked(on_thread_start.as_ref(), || threads::spawn(ThreadRole::DirtyRate, measure, died))
            .map_err(StartError::system)?;
        Ok(Self { shared })
    }

    /// The current progress, without waiting.
    pub fn state(&self) -> MeasuringState {
        self.shared.progress.lock().state.clone()
    }

    /// Whether the measurement has not ended yet.
    pub fn is_running(&self) -> bool {
        matches!(self.shared.progress.lock().state, MeasuringState::Measuring)
    }

    /// Ends the measurement without a result. Tracking has stopped when this returns.
    pub fn cancel(&self) {
        self.shared.progress.lock().is_cancelled = true;
        self.shared.changed.notify_all();
        // The result is `Cancelled`, or a reading that was completed just before. Both mean that the measurement has
        // ended.
        let _ = self.wait();
    }

    /// Ends the measurement with the pages counted so far, but not before `SHORTEST` has passed. Tracking has
    /// stopped when this returns.
    pub fn finish(&self) {
        self.shared.progress.lock().is_finished = true;
        self.shared.changed.notify_all();
        // Success and failure both mean that the measurement has ended.
        let _ = self.wait();
    }

    /// Waits until the measurement ends.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`], or the reason why tracking failed.
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
    /// Body of the thread. It drops the claim before it publishes the result, so that a waiting caller may start a
    /// migration immediately.
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
                // Read now, because the VM does not count vCPU rates after tracking has stopped.
                let vcpus = vm.throttle().map(Throttle::vcpu_dirty_rates).unwrap_or_default();
                DirtyReading {
                    vcpu_bytes_per_second: vcpus.iter().map(|vcpu| vcpu.rate_bytes).collect(),
                    ..reading
                }
            })
        };
        let counted = tried("a callback of the VMM while its dirty rate was measured", counting);
        // An error here replaces the result: a log that cannot be stopped is the more serious problem.
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
        // Pages were armed one after the other. The middle of that time is the average moment.
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

    /// Waits for `time`, or until `may_end` returns true.
    fn sleep(&self, time: Duration, may_end: impl Fn(&Progress) -> bool) -> Result<(), MigrationError> {
        let mut progress = self.progress.lock();
        self.changed.wait_while_for(&mut progress, |progress| !may_end(progress), time);
        if progress.is_cancelled { Err(MigrationError::Cancelled) } else { Ok(()) }
    }
}

/// Runs `act` and returns the time at which it began.
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
