//! The process guest: threads over RAM, for machines without /dev/kvm and dirty rates of GB/s.
//!
//! Each worker of the [`crate::model`] is a thread of this process. RAM is the engine's; what KVM would
//! report about it is reported by a dirty log of the guest's choice ([`Tracking`]). Everything that is not
//! RAM (counters, seeds, histories, clocks) is the state of one device, `process-guest`.
//!
//! A stopped guest has no threads; [`SourceVm::stop`] joins them and their state comes back with them.
//! So what runs, where the state is, and whether it may be saved is one value, its phase.
//!
//! The guest can be stopped between two steps or within one ([`StopPoint`]), as a vCPU is. The next
//! run then goes on with the same step at the same word.
//!
//! It can be slowed down as a VMM slows its vCPUs down ([`sterna::Throttle`]): each worker has a throttle and sleeps
//! when that says so.
//!
//! Downtime is measured from inside: a worker notes the longest time between two of its beats, on a
//! clock that goes on across the migration ([`ProcessGuest::max_gap`]).
#![forbid(unsafe_code)]

mod clock;
mod config;
mod fill;
mod live;
mod state;
mod tracker;
mod vm;
mod worker;

use std::sync::Arc;
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

/// A guest made of threads, or the place for one. See the module for the model.
pub struct ProcessGuest {
    config: ProcessConfig,
    inner: Arc<Inner>,
    extra_devices: Mutex<Vec<Arc<dyn Device>>>,
    hooks: Mutex<Vec<Arc<dyn Hook>>>,
}

/// What the guest's devices and threads share with it.
struct Inner {
    ram: GuestRam,
    tracker: Tracker,
    phase: Mutex<Phase>,
    live: Arc<Live>,
    level: u32,
}

/// Where the guest's state is.
enum Phase {
    /// No guest yet.
    Waiting,
    /// A migration has brought its state; it has not run here and may still be taken back.
    Loaded(GuestState),
    /// Its threads have it.
    Running(Run),
    /// It stands still.
    Stopped(GuestState),
    /// It was ended.
    Ended,
}

impl ProcessGuest {
    /// Makes RAM, fills it and puts a guest into it that has not taken a step: paused; [`Self::cont`] or
    /// [`SourceVm::resume`] lets it run.
    ///
    /// # Errors
    /// [`ProcessError`]: the configuration breaks a rule, RAM or tracking cannot be had.
    pub fn boot(config: ProcessConfig) -> Result<Arc<Self>, ProcessError> {
        let ram = new_ram(&config)?;
        Self::boot_in(config, ram)
    }

    /// As [`Self::boot`], in RAM that exists and reads as zero (`config.blocks` is not looked at).
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn boot_in(config: ProcessConfig, ram: GuestRam) -> Result<Arc<Self>, ProcessError> {
        let state = GuestState::initial(&config, &share::divide(&ram, config.workers.max(1)))?;
        fill::fill(&ram, config.fill, config.workers)?;
        Self::assemble(config, ram, Phase::Stopped(state))
    }

    /// Makes RAM for a guest that a migration brings. What it is (workers, pattern, words, fill) comes
    /// with it; only its blocks must be known here.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn waiting(config: ProcessConfig) -> Result<Arc<Self>, ProcessError> {
        let ram = new_ram(&config)?;
        Self::waiting_in(config, ram)
    }

    /// As [`Self::waiting`], in RAM that exists and reads as zero (`config.blocks` is not looked at).
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn waiting_in(config: ProcessConfig, ram: GuestRam) -> Result<Arc<Self>, ProcessError> {
        Self::assemble(config, ram, Phase::Waiting)
    }

    fn assemble(config: ProcessConfig, ram: GuestRam, phase: Phase) -> Result<Arc<Self>, ProcessError> {
        let tracker = Tracker::new(config.tracking, &ram)?;
        let live = Arc::new(Live::new(config.rate, config.stop_point));
        let inner = Arc::new(Inner { ram, tracker, phase: Mutex::new(phase), live, level: config.level });
        Ok(Arc::new(Self { config, inner, extra_devices: Mutex::default(), hooks: Mutex::default() }))
    }

    /// The guest's name, as configured.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Whether there is a guest: booted here, or arrived and taken over.
    pub fn has_guest(&self) -> bool {
        matches!(*self.inner.phase(), Phase::Running(_) | Phase::Stopped(_))
    }

    /// Stops the guest, as an operator.
    ///
    /// # Errors
    /// There is no guest.
    pub fn pause(&self) -> Result<(), VmError> {
        self.stop()
    }

    /// Lets the guest run on, as an operator.
    ///
    /// # Errors
    /// There is no guest, or a thread cannot be had.
    pub fn cont(&self) -> Result<(), VmError> {
        self.resume()
    }

    /// Ends the guest. Its RAM stays until the last handle is dropped.
    pub fn quit(&self) {
        let mut phase = self.inner.phase();
        if let Phase::Running(run) = std::mem::replace(&mut *phase, Phase::Ended) {
            drop(run.stop());
        }
    }

    /// Another device in the stream, after the guest's own. For tests of device state.
    pub fn add_device(&self, device: Arc<dyn Device>) {
        self.extra_devices.lock().push(device);
    }

    /// Something that changes hands with the guest.
    pub fn add_hook(&self, hook: Arc<dyn Hook>) {
        self.hooks.lock().push(hook);
    }

    /// Changes every worker's pattern and working set (pages per worker; None: its whole share), also
    /// while the guest runs. Holds from each worker's next step.
    ///
    /// # Errors
    /// There is no guest, a working set of no pages, or more changes than a history holds.
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

    /// Steps per second and worker, 0 for as many as it can; also while the guest runs. Not part of the
    /// state: a guest that arrives runs at the rate of its new place.
    pub fn set_rate(&self, steps_per_second: u64) {
        self.inner.live.set_rate(steps_per_second);
    }

    /// Where [`SourceVm::stop`] stops the workers, from now on.
    pub fn set_stop_point(&self, point: StopPoint) {
        self.inner.live.set_stop_point(point);
    }

    /// How far the guest has come; in every phase.
    pub fn progress(&self) -> Progress {
        match &*self.inner.phase() {
            Phase::Running(run) => run.progress(),
            Phase::Stopped(state) | Phase::Loaded(state) => state.progress(),
            Phase::Waiting | Phase::Ended => Progress::default(),
        }
    }

    /// The longest time between two beats of one worker, wherever the guest ran: after a migration the
    /// downtime as the guest saw it. Beats come at least every millisecond if the threads get CPU time.
    pub fn max_gap(&self) -> Duration {
        self.progress().max_gap
    }

    /// Forgets the longest gap so far, to measure the next migration.
    pub fn reset_max_gap(&self) {
        match &mut *self.inner.phase() {
            Phase::Running(run) => run.reset_max_gap(),
            Phase::Stopped(state) | Phase::Loaded(state) => state.reset_max_gap(),
            Phase::Waiting | Phase::Ended => {}
        }
    }

    /// Waits until every worker has lived on: at least `steps` more steps each if its pattern has any,
    /// else as many beats. False if `limit` passes first.
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

    /// Checks that RAM is one consistent cut. The guest must stand still, or have been loaded and not
    /// started.
    ///
    /// # Errors
    /// [`CheckError::Running`], [`CheckError::NoGuest`], or [`CheckError::Ram`].
    pub fn check(&self) -> Result<Verdict, CheckError> {
        check(&self.inner.ram, &self.cut()?)
    }

    /// What [`Self::check`] demands of RAM: to check a copy of it, or a copy that was damaged on purpose.
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
    fn phase(&self) -> MutexGuard<'_, Phase> {
        // A phase is replaced as a whole, so one that a panicking thread left behind is a whole one.
        self.phase.lock()
    }
}

impl Phase {
    fn run_state(&self) -> RunState {
        if matches!(self, Self::Running(_)) { RunState::Running } else { RunState::Paused }
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
        Cut { plan: self.plan, fill: self.fill, workers: workers.collect() }
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
