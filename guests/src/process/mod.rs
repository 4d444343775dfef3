//! The process guest: threads over RAM, for machines without /dev/kvm and for dirty rates of GB/s.
//!
//! Each worker of the [`crate::model`] is a thread of this process. RAM belongs to the engine. A dirty log
//! of the guest's choice ([`Tracking`]) reports the writes that KVM would report. All state outside RAM
//! (counters, seeds, histories, clocks) is the state of one device, `process-guest`.
//!
//! Steps may also zero pages ([`crate::model::Act`]). Memory that the balloon gives back is not a worker's
//! write. Therefore the guest reports it to its dirty log, as a VMM does.
//!
//! A stopped guest has no threads: [`SourceVm::stop`] joins them, and each returns its state. One value,
//! the phase, therefore describes what runs, where the state is, and whether it may be saved.
//!
//! The guest can be stopped between two steps or within one ([`StopPoint`]), as a vCPU is. The next run
//! then continues the same step at the same word.
//!
//! The guest can be throttled as a VMM throttles its vCPUs ([`sterna::Throttle`]): each worker sleeps for
//! the time that its throttle computes.
//!
//! Downtime is measured inside the guest. A worker records the longest time between two of its beats, on a
//! clock that continues across the migration ([`ProcessGuest::max_gap`]).
#![forbid(unsafe_code)]

mod clock;
mod config;
mod fill;
mod live;
mod state;
mod tracker;
mod vm;
mod worker;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use sterna::{Device, Hook, RunState, SourceVm, VmError};
use sterna_ram::{GuestRam, RamBlock};

pub use config::{ProcessConfig, ProcessError, StopPoint};
pub use live::Progress;
pub use tracker::Tracking;

use crate::checker::{CheckError, Cut, InFlight, Verdict, WorkerCut, check};
use crate::model::{Pattern, Share, share};
use live::Live;
use state::GuestState;
use tracker::Tracker;
use worker::Run;

/// A guest of threads, or the place for a guest that has not arrived. The module documentation explains the
/// model.
pub struct ProcessGuest {
    config: ProcessConfig,
    inner: Arc<Inner>,
    extra_devices: Mutex<Vec<Arc<dyn Device>>>,
    hooks: Mutex<Vec<Arc<dyn Hook>>>,
}

/// State that the guest shares with its devices and threads.
struct Inner {
    ram: GuestRam,
    tracker: Tracker,
    phase: Mutex<Phase>,
    /// The kind of the phase at its last unlock. Readable while a stop is in progress.
    last_phase: AtomicU8,
    live: Arc<Live>,
    level: u32,
}

/// The place of the guest's state.
enum Phase {
    /// No guest has arrived yet.
    Waiting,
    /// A migration has delivered the state. The guest has not run here, and may still return to the source.
    Loaded(GuestState),
    /// The guest's threads have the state.
    Running(Run),
    /// The guest is paused.
    Stopped(GuestState),
    /// The guest was ended.
    Ended,
}

impl ProcessGuest {
    /// Allocates RAM, fills it and creates a paused guest that has taken no step.
    ///
    /// [`Self::cont`] or [`SourceVm::resume`] starts the guest.
    ///
    /// # Errors
    /// [`ProcessError`]: the configuration breaks a rule, or RAM or tracking is not available.
    pub fn boot(config: ProcessConfig) -> Result<Arc<Self>, ProcessError> {
        let ram = new_ram(&config)?;
        Self::boot_in(config, ram)
    }

    /// As [`Self::boot`], in existing RAM that reads as zero (`config.blocks` is ignored).
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn boot_in(config: ProcessConfig, ram: GuestRam) -> Result<Arc<Self>, ProcessError> {
        let state = GuestState::initial(&config, &share::divide(&ram, config.workers.max(1)))?;
        fill::fill(&ram, config.fill, config.workers)?;
        Self::assemble(config, ram, Phase::Stopped(state))
    }

    /// Allocates RAM for a guest that a migration delivers.
    ///
    /// The guest's properties (workers, pattern, words, fill) arrive with it. Only its blocks must be
    /// configured here.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn waiting(config: ProcessConfig) -> Result<Arc<Self>, ProcessError> {
        let ram = new_ram(&config)?;
        Self::waiting_in(config, ram)
    }

    /// As [`Self::waiting`], in existing RAM that reads as zero (`config.blocks` is ignored).
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn waiting_in(config: ProcessConfig, ram: GuestRam) -> Result<Arc<Self>, ProcessError> {
        Self::assemble(config, ram, Phase::Waiting)
    }

    fn assemble(config: ProcessConfig, ram: GuestRam, phase: Phase) -> Result<Arc<Self>, ProcessError> {
        let tracker = Tracker::new(config.tracking, &ram)?;
        let live = Arc::new(Live::new(config.rate, config.stop_point));
        let last_phase = AtomicU8::new(phase.number());
        let inner =
            Arc::new(Inner { ram, tracker, phase: Mutex::new(phase), last_phase, live, level: config.level });
        Ok(Arc::new(Self { config, inner, extra_devices: Mutex::default(), hooks: Mutex::default() }))
    }

    /// The configured name of the guest.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Whether a guest exists here: it was booted here, or has arrived and was taken over.
    pub fn has_guest(&self) -> bool {
        matches!(self.inner.last_phase.load(Ordering::Acquire), RUNNING | STOPPED)
    }

    /// Stops the guest at an operator's request.
    ///
    /// # Errors
    /// No guest exists here.
    pub fn pause(&self) -> Result<(), VmError> {
        self.stop()
    }

    /// Resumes the guest at an operator's request.
    ///
    /// # Errors
    /// No guest exists here, or a thread could not be created.
    pub fn cont(&self) -> Result<(), VmError> {
        self.resume()
    }

    /// Ends the guest. Its RAM exists until the last handle is dropped.
    pub fn quit(&self) {
        let mut phase = self.inner.phase();
        if let Phase::Running(run) = std::mem::replace(&mut *phase, Phase::Ended) {
            drop(run.stop());
        }
    }

    /// Adds a device to the stream, after the guest's own. For tests of device state.
    pub fn add_device(&self, device: Arc<dyn Device>) {
        self.extra_devices.lock().push(device);
    }

    /// Adds a hook, for a resource that changes hands with the guest.
    pub fn add_hook(&self, hook: Arc<dyn Hook>) {
        self.hooks.lock().push(hook);
    }

    /// Changes every worker's pattern and working set, also while the guest runs.
    ///
    /// The working set is in pages per worker; `None`: its whole share. The change applies from
    /// each worker's next step on.
    ///
    /// # Errors
    /// No guest exists here, the working set has no pages, or the history is full.
    pub fn set_pattern(&self, pattern: Pattern, working_set_pages: Option<u64>) -> Result<(), VmError> {
        if working_set_pages == Some(0) {
            return Err(VmError::new("set the working set", "it must have at least one page"));
        }
        match &mut *self.inner.phase() {
            Phase::Running(_) => self.inner.live.request(pattern, working_set_pages),
            Phase::Stopped(state) => state.set_pattern(&self.inner.ram, pattern, working_set_pages),
            _ => Err(no_guest("set the pattern")),
        }
    }

    /// Sets the steps per second and worker, 0 for no limit; also while the guest runs.
    ///
    /// The rate is not part of the state: a guest that arrives runs at the rate of its destination.
    pub fn set_rate(&self, steps_per_second: u64) {
        self.inner.live.set_rate(steps_per_second);
    }

    /// Sets the point at which later calls of [`SourceVm::stop`] interrupt the workers.
    pub fn set_stop_point(&self, point: StopPoint) {
        self.inner.live.set_stop_point(point);
    }

    /// The guest's progress, in every phase.
    pub fn progress(&self) -> Progress {
        match &*self.inner.phase() {
            Phase::Running(run) => run.progress(),
            Phase::Stopped(state) | Phase::Loaded(state) => state.progress(),
            Phase::Waiting | Phase::Ended => Progress::default(),
        }
    }

    /// The longest time between two beats of one worker, on all hosts of the guest. After a migration it is
    /// the downtime that the guest observed.
    ///
    /// Beats are at most a millisecond apart if the threads get CPU time.
    pub fn max_gap(&self) -> Duration {
        self.progress().max_gap
    }

    /// Resets the longest gap, so that the next migration can be measured.
    pub fn reset_max_gap(&self) {
        match &mut *self.inner.phase() {
            Phase::Running(run) => run.reset_max_gap(),
            Phase::Stopped(state) | Phase::Loaded(state) => state.reset_max_gap(),
            Phase::Waiting | Phase::Ended => {}
        }
    }

    /// Waits until every worker has taken `steps` more steps.
    ///
    /// A worker whose pattern has no steps must advance by as many beats. Returns false if `limit`
    /// passes first.
    pub fn wait_progress(&self, steps: u64, limit: Duration) -> bool {
        let before = self.progress();
        let deadline = Instant::now() + limit;
        while !self.progress().is_beyond(&before, steps) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Checks that RAM is one consistent cut.
    ///
    /// The guest must be paused, or loaded and not started.
    ///
    /// # Errors
    /// [`CheckError::Running`], [`CheckError::NoGuest`], or [`CheckError::Ram`].
    pub fn check(&self) -> Result<Verdict, CheckError> {
        check(&self.inner.ram, &self.cut()?)
    }

    /// The cut that [`Self::check`] demands of RAM, for checks of a copy.
    ///
    /// # Errors
    /// [`CheckError::Running`], [`CheckError::NoGuest`].
    pub fn cut(&self) -> Result<Cut, CheckError> {
        match &*self.inner.phase() {
            Phase::Stopped(state) | Phase::Loaded(state) => Ok(state.cut(&self.inner.ram)),
            Phase::Running(_) => Err(CheckError::Running),
            Phase::Waiting | Phase::Ended => Err(CheckError::NoGuest),
        }
    }
}

impl Drop for ProcessGuest {
    fn drop(&mut self) {
        self.quit();
    }
}

impl std::fmt::Debug for ProcessGuest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessGuest").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Inner {
    fn phase(&self) -> PhaseGuard<'_> {
        // A phase is replaced in one assignment, so a phase that a panicking thread left is valid.
        PhaseGuard { phase: self.phase.lock(), last: &self.last_phase }
    }

    /// Whether the guest runs. As in a VMM, it counts as running until a stop has ended.
    fn run_state(&self) -> RunState {
        match self.last_phase.load(Ordering::Acquire) {
            RUNNING => RunState::Running,
            _ => RunState::Paused,
        }
    }
}

/// The locked phase. The drop publishes its kind in `last_phase`.
struct PhaseGuard<'a> {
    phase: MutexGuard<'a, Phase>,
    last: &'a AtomicU8,
}

impl Deref for PhaseGuard<'_> {
    type Target = Phase;
    fn deref(&self) -> &Phase {
        &self.phase
    }
}

impl DerefMut for PhaseGuard<'_> {
    fn deref_mut(&mut self) -> &mut Phase {
        &mut self.phase
    }
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.last.store(self.phase.number(), Ordering::Release);
    }
}

const RUNNING: u8 = 1;
const STOPPED: u8 = 2;

impl Phase {
    fn number(&self) -> u8 {
        match self {
            Self::Running(_) => RUNNING,
            Self::Stopped(_) => STOPPED,
            Self::Waiting | Self::Loaded(_) | Self::Ended => 0,
        }
    }
}

impl GuestState {
    fn cut(&self, ram: &GuestRam) -> Cut {
        let shares: Vec<Share> = share::divide(ram, self.workers.len());
        let workers = self.workers.iter().zip(shares).map(|(worker, share)| WorkerCut {
            share,
            steps: worker.steps,
            in_flight: InFlight::Words(worker.partial_words),
            history: worker.history.clone(),
            seed: worker.seed,
            witness: None,
        });
        Cut { plan: self.plan, fill: self.fill, acts: self.acts, workers: workers.collect() }
    }
}

fn new_ram(config: &ProcessConfig) -> Result<GuestRam, ProcessError> {
    let blocks: Result<Vec<_>, _> = config
        .blocks
        .iter()
        .map(|(name, len_bytes)| RamBlock::new(name, *len_bytes, config.backing))
        .collect();
    Ok(GuestRam::new(blocks?)?)
}

fn no_guest(what: &str) -> VmError {
    VmError::new(what, "there is no guest here")
}
