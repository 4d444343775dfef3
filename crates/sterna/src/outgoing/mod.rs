//! The source: sends a guest to a destination or a standby, or into a file.
//!
//! One control thread ([`control`]) performs the actions of the handover machine of `sterna-proto`. One thread
//! per lane sends pages, and one thread reads the return path. Every thread reports events to the machine through
//! [`shared`], so that the machine alone decides their order.

mod ask;
mod asking;
mod carrier;
mod cause;
mod check;
#[cfg(feature = "standby")]
mod checkpoints;
#[cfg(not(feature = "standby"))]
#[path = "checkpoints/off.rs"]
mod checkpoints;
mod configuration;
mod control;
mod course;
mod file;
pub(crate) mod guest_source;
mod lanes;
mod last_sync;
mod limits;
pub mod live;
mod main_channel;
pub(crate) mod main_stream;
mod measure;
mod memory_sums;
mod outcome;
mod pipe;
#[cfg(feature = "postcopy")]
mod postcopy;
#[cfg(not(feature = "postcopy"))]
#[path = "postcopy/off.rs"]
mod postcopy;
#[cfg(feature = "standby")]
mod protected;
#[cfg(feature = "standby")]
pub(crate) mod protection;
#[cfg(not(feature = "standby"))]
#[path = "protection/off.rs"]
pub(crate) mod protection;
#[cfg(feature = "rdma")]
mod rdma;
mod reconnection;
mod return_path;
mod running_streams;
mod same_host;
mod shared;
mod streams;
mod switchover;
mod transfer;
mod waits;
mod whole_memory;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::source::{Config, Event as Fed, Source, State};
use sterna_ram::Custody;
use sterna_transport::Address;

pub use outcome::{Outcome, ResumeError, RetryError, Waited};
pub use sterna_proto::source::{Decision, Refusal};

use crate::bell::EventFd;
use crate::error::VmError;
use crate::events::{Observer, Status};
use crate::identity::Identity;
use crate::limits::machine_limits;
use crate::params::{Capabilities, MigrationMode, Parameters};
use crate::precopy::Recording;
use crate::rules::Feature;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::stats::Statistics;
use crate::threads::hooked;
use crate::vm::SourceVm;
use check::{check, check_postcopy, check_resume, check_sharable, check_throttle};
use guest_source::{GuestSource, LiveVm};
use limits::ack_form;
use protection::Protecting;
use same_host::SharedMemory;
use shared::Shared;

/// An outgoing migration. Cloning gives another handle to the same one; dropping all handles does not end it.
#[derive(Clone)]
pub struct Migration {
    shared: Arc<Shared>,
}

impl Migration {
    /// Starts to migrate the guest of `vm` to `to`, and returns immediately. A control thread does the work.
    ///
    /// The guest runs until the switchover. If anything fails before the commit, it continues to run here.
    ///
    /// If a server of this process still has pages of the guest ([`GuestRam::complete`](sterna_ram::GuestRam::complete)),
    /// it places all of them before the migration connects. [`Statistics::missing_bytes`] shows how many are left.
    ///
    /// A descriptor that `to` names by its number (`fd:7`) is duplicated. The caller's descriptor stays open,
    /// whatever the result of the migration. A descriptor that was handed over ([`Address::Handed`]) belongs to
    /// the migration after a successful start.
    ///
    /// # Errors
    /// * [`StartError::Settings`]: parameters exclude each other, or do not fit `to`.
    /// * [`StartError::Guest`]: the guest is not here, or another migration has it ([`Custody`]). The error names
    ///   the remedy.
    pub fn start(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let source: Arc<dyn GuestSource> = match params.mode {
            MigrationMode::Normal => Arc::new(LiveVm::new(vm)),
            MigrationMode::CprTransfer => Arc::new(SharedMemory::new(vm)),
        };
        Self::begin(source, to, params, capabilities, observer)
    }

    /// The status at this moment.
    pub fn status(&self) -> Status {
        self.shared.measures.statistics.lock().status()
    }

    /// The statistics at this moment.
    pub fn statistics(&self) -> Statistics {
        let error = self.shared.error().map(|error| error.to_string());
        let statistics = self.shared.measures.statistics.lock();
        // After completion, an earlier problem such as a lost acknowledgement is not reported as an error.
        let error = error.filter(|_| statistics.status() != Status::Completed);
        let streams = self.shared.session.streams.lock().as_ref().map(|streams| streams.statistics());
        let counts_rdma = self.shared.session.facts.counts_rdma;
        let mut snapshot = statistics.snapshot(self.shared.measures.counters.now(), error);
        let since_start = |instant| statistics.since_start(instant);
        snapshot.postcopy =
            snapshot.postcopy.map(|postcopy| self.shared.postcopy.report(postcopy, since_start));
        Statistics {
            rdma: counts_rdma.then(|| self.shared.measures.rdma.now()),
            streams: streams.unwrap_or_default(),
            free_pages: self.shared.measures.counters.free_pages(),
            missing_bytes: self.shared.guest.ram.missing_bytes(),
            postcopy_requests: self.shared.postcopy.requests(),
            ..snapshot
        }
    }

    /// The inputs and decisions of the precopy policy; `None` before pages move.
    ///
    /// The recording is complete after the migration has ended.
    pub fn recording(&self) -> Option<Recording> {
        self.shared.measures.policy.lock().as_ref().map(|policy| policy.recording().clone())
    }

    /// Cancels the migration; the guest stays here and continues to run. May be called from any thread at any
    /// time.
    ///
    /// # Errors
    /// [`Refusal`] from the commit on, because the destination may already run the guest.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::Cancel)
    }

    /// Continues the switchover after `pause-before-switchover` (QMP's `migrate-continue`).
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PreSwitchover`].
    pub fn continue_switchover(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::OperatorContinue)
    }

    /// Switches to postcopy: the guest resumes at the destination before its pages are there.
    ///
    /// QMP's command is `migrate-start-postcopy`.
    ///
    /// The switch happens as soon as possible. Before it, the parts of device streams that can be read while the
    /// guest runs are read, as long as their remaining bytes decrease. If precopy completes meanwhile, the
    /// migration ends without the switch.
    ///
    /// # Errors
    /// [`Refusal`] without [`Capabilities::postcopy_ram`], or if the handover of the guest has begun.
    pub fn start_postcopy(&self) -> Result<(), Refusal> {
        if !self.shared.capabilities.postcopy_ram {
            return Err(Refusal::NoPostcopy);
        }
        let state = self.shared.driver.inspect(Source::state);
        // If the connection is lost now, the switch follows after the reconnection.
        let is_lost = matches!(state, State::Suspending | State::Reconnecting);
        if state > State::Active && !is_lost {
            return Err(Refusal::NotActive { state });
        }
        self.shared.postcopy.want();
        self.shared.driver.nudge();
        Ok(())
    }

    /// Resumes a postcopy over a new connection (QMP's `migrate` with `resume`).
    ///
    /// The old connection broke before.
    ///
    /// Dials the destination at `to`, learns which pages it has, and sends the others. Returns immediately. If
    /// the attempt fails, the status is [`Status::PostcopyPaused`] again, and this function may be called again.
    ///
    /// # Errors
    /// [`ResumeError`] unless the status is [`Status::PostcopyPaused`], or if no destination can be at this
    /// address. An error changes nothing.
    pub fn resume(&self, to: &Address) -> Result<(), ResumeError> {
        check_resume(to, &self.shared.capabilities)?;
        let shared = &self.shared;
        if shared.driver.inspect(Source::state) == State::PostcopyPaused
            && let Some(asking) = &*shared.handover.asking.lock()
        {
            // The question to the destination is cancelled, because its answer is not needed any more.
            asking.stop();
        }
        let before = shared.reconnection.recovery.go_to(to.clone());
        shared.feed(Fed::ResumeRequested).map_err(|refusal| {
            shared.reconnection.recovery.go_to(before);
            refusal.into()
        })
    }

    /// Breaks the connection of a postcopy on purpose (QMP's `migrate-pause`).
    ///
    /// The guest runs at the destination until it needs a page that has not arrived. No new connection is made
    /// before [`Migration::resume`].
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PostcopyActive`] or [`Status::PostcopyRecover`]. The status
    /// [`Status::PostcopyPaused`] is also accepted if this side would reconnect by itself.
    pub fn pause(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::PauseRequested)?;
        if let Some(asking) = &*self.shared.handover.asking.lock() {
            asking.stop();
        }
        // This unblocks threads that write to a destination that does not read.
        self.shared.interrupt();
        Ok(())
    }

    /// Changes parameters of the running migration. [`Parameters`] lists those that are live.
    ///
    /// # Errors
    /// [`SettingsError::NotLive`] if `change` changes another parameter. Then no parameter is changed.
    pub fn set_live(&self, change: impl FnOnce(&mut Parameters)) -> Result<(), SettingsError> {
        let mut params = self.shared.params.lock();
        let mut wanted = params.clone();
        change(&mut wanted);
        *params = wanted.for_running(&params)?;
        self.shared.session.limiter.set(params.max_bandwidth_bytes);
        self.shared.postcopy.limit(params.max_postcopy_bandwidth_bytes);
        Ok(())
    }

    /// Records the operator's decision which side runs the guest.
    ///
    /// The engine cannot check the decision: a wrong [`Decision::SourceRuns`] lets two guests run. Neither decision
    /// can be revoked. The status of the migration is one of these:
    ///
    /// * [`Status::Undecided`]. After [`Decision::SourceRuns`] the hooks are taken back, and the guest resumes if it
    ///   ran. [`Decision::DestinationRuns`] ends the migration as completed. In postcopy the status becomes
    ///   [`Status::PostcopyPaused`] instead, because the destination lacks pages that only this side has.
    ///   [`Migration::resume`] then sends them.
    /// * [`Status::PostcopyPaused`], [`Status::PostcopyRecover`]: only [`Decision::DestinationRuns`] is possible. It
    ///   ends the migration as completed, and gives up the pages that the destination lacks.
    ///
    /// # Errors
    /// [`Refusal`] in any other status, and for [`Decision::SourceRuns`] in postcopy after the guest was started or
    /// the operator decided for the destination. [`Refusal::NotUndecided`] if this side has just stopped being
    /// undecided, and [`Migration::status`] does not show it yet.
    pub fn decide(&self, decision: Decision) -> Result<(), Refusal> {
        // A decision about an undecided migration must not give up pages. The machine may already be in a pause, after
        // an answer of the destination or another operator's decision.
        let was_undecided = self.status() == Status::Undecided;
        self.decide_unless(decision, |state| was_undecided && state != State::Undecided)
    }

    /// As [`Migration::decide`], if the status is still `seen`, which the operator decided about.
    ///
    /// The same decision has another effect after a change from [`Status::Undecided`] to [`Status::PostcopyPaused`]: it
    /// gives up pages. [`Status::PostcopyPaused`] and [`Status::PostcopyRecover`] count as the same, because a decision
    /// has the same effect in both.
    ///
    /// # Errors
    /// [`Refusal::NotUndecided`] if the status is another one, or if `seen` is none of these three. Otherwise as
    /// [`Migration::decide`].
    pub fn decide_seen(&self, decision: Decision, seen: Status) -> Result<(), Refusal> {
        self.decide_unless(decision, |state| match seen {
            Status::Undecided => state != State::Undecided,
            Status::PostcopyPaused | Status::PostcopyRecover => {
                !matches!(state, State::PostcopyPaused | State::PostcopyRecover)
            }
            _ => true,
        })
    }

    fn decide_unless(&self, decision: Decision, is_other: impl FnOnce(State) -> bool) -> Result<(), Refusal> {
        self.shared.feed_unless(Fed::OperatorDecides(decision), |state| {
            is_other(state).then_some(Refusal::NotUndecided { state })
        })?;
        if let Some(asking) = &*self.shared.handover.asking.lock() {
            asking.stop();
        }
        Ok(())
    }

    /// Tries again to release a held guest, after an earlier attempt failed.
    ///
    /// Waits until the last attempt has ended. Therefore the observer must not call it in its own call; another
    /// thread may.
    ///
    /// # Errors
    /// * [`RetryError::Refused`]: the outcome does not report a held guest.
    /// * [`RetryError::System`]: no thread could be started, or
    ///   [`Parameters::on_thread_start`] panicked on it. The guest is still held, and the call may be repeated.
    pub fn retry(&self) -> Result<(), RetryError> {
        let hook = self.shared.params.lock().on_thread_start.clone();
        hooked(hook.as_ref(), || control::retry(&self.shared))
    }

    /// Whether the VMM may run the guest when its operator asks for it.
    ///
    /// False from the stop for the switchover until it is undone, and always after the destination has the guest.
    /// The answer is about the guest, not only about this migration: after a later migration it depends on that
    /// one ([`GuestRam::custody`](sterna_ram::GuestRam::custody)).
    pub fn may_guest_run(&self) -> bool {
        self.shared.guest.ram.custody().may_run()
    }

    /// Runs `act`, an operator's `cont` or `stop`, if the guest is free ([`Migration::may_guest_run`]).
    ///
    /// `None`, without running `act`, if the guest is not free. Check and act are one step: the switchover stops
    /// the guest only after `act` has returned. No `act` begins after the switchover has begun, until the guest is
    /// free again. A VMM that checks first and acts later could run the guest while the destination runs it too.
    ///
    /// `act` runs under no lock. It may take as long as a vCPU needs to leave the guest, and it may ask this
    /// migration for its status. Only a switchover waits for it. The function is
    /// [`GuestRam::while_free`](sterna_ram::GuestRam::while_free), which also works without a migration.
    pub fn while_guest_is_free<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        self.shared.guest.ram.while_free(act).ok()
    }

    /// Whether the guest was saved to a file, and is still stopped here.
    pub fn is_saved(&self) -> bool {
        file::is_saved(&self.shared)
    }

    /// Resumes a guest that was saved to a file, after acquiring its hooks (disks, locks).
    ///
    /// The file is then a snapshot of an earlier state. The call waits for the end of the migration. Therefore
    /// the observer must not call it in its own call; another thread may.
    ///
    /// The callbacks run on the calling thread. With several devices with a stream, the call also starts threads, which
    /// run [`Parameters::on_thread_start`] first.
    ///
    /// # Errors
    /// [`VmError`] unless this is a completed migration to a file, or if the VMM reports an error. The guest then
    /// stays stopped.
    pub fn resume_saved(&self) -> Result<(), VmError> {
        let hook = self.shared.params.lock().on_thread_start.clone();
        hooked(hook.as_ref(), || file::resume(&self.shared))
    }

    /// The outcome; `None` before the migration has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.shared.outcome()
    }

    /// Shuts down the channels of a protection.
    #[doc(hidden)]
    pub fn close_channels(&self) {
        self.shared.interrupt();
    }

    /// Wakes the control thread so that it checks for changes.
    #[doc(hidden)]
    pub fn nudge(&self) {
        self.shared.driver.nudge();
    }

    /// Waits for the end of the migration.
    ///
    /// An undecided migration ends only when the destination answers or an operator decides.
    pub fn wait(&self) -> Outcome {
        self.shared.wait()
    }

    /// Waits for the end of the migration, at most for `limit`.
    ///
    /// If the migration becomes undecided meanwhile, the call returns [`Waited::Undecided`] immediately. If it was
    /// undecided before, the call returns that after `limit`.
    pub fn wait_timeout(&self, limit: Duration) -> Waited {
        self.shared.wait_timeout(limit)
    }

    /// A descriptor that becomes readable at each event and at the end, for a VMM with an event loop.
    ///
    /// # Errors
    /// The kernel gives no further eventfd.
    pub fn event_fd(&self) -> std::io::Result<EventFd> {
        self.shared.bell.listener()
    }

    /// Starts to migrate the guest of `guest_source`.
    #[doc(hidden)]
    pub fn begin(
        guest_source: Arc<dyn GuestSource>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        Self::begin_as(guest_source, to, params, capabilities, observer, None)
    }

    fn begin_as(
        guest_source: Arc<dyn GuestSource>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        protecting: Option<Arc<Protecting>>,
    ) -> Result<Self, StartError> {
        let is_image = !guest_source.is_in_memory();
        check(to, &params, &capabilities, |features| {
            features
                .with(Feature::Image, is_image)
                .with(Feature::StoredImage, is_image)
                .with(Feature::Protection, protecting.is_some())
        })?;
        let mut capabilities = capabilities;
        let facts = &carrier::of(to).facts;
        if facts.stores {
            // Nothing answers.
            capabilities.return_path = false;
        }
        let (vm, ram) = (guest_source.vm(), guest_source.ram());
        if params.mode == MigrationMode::CprTransfer {
            check_sharable(vm.as_ref(), ram)?;
        }
        check_throttle(vm.as_ref(), &capabilities)?;
        check_postcopy(&capabilities, vm.as_ref())?;
        let pages = ram.poisoned();
        if !pages.is_empty() {
            return Err(StartError::Poisoned { pages });
        }
        let leaving = Custody::Leaving { is_free: true };
        let custody = ram.claim_custody(leaving, Custody::may_leave).map_err(StartError::Guest)?;
        let tracking = ram.claim_tracking().ok_or(StartError::Tracked)?;
        let config = Config {
            return_path: capabilities.return_path,
            compatibility: vm.compatibility().is_some(),
            pause_before_switchover: capabilities.pause_before_switchover,
            protects: protecting.is_some(),
            postcopy: capabilities.postcopy_ram,
            switchover_ack: ack_form(&capabilities, &vm.machine_type()),
            limits: sterna_proto::Limits {
                // A descriptor is one connection. Only an operator can name another address, in postcopy.
                reconnect: if facts.can_reconnect { params.reconnect_window } else { Duration::ZERO },
                switchover: params.limits.switchover.max(params.downtime_limit.saturating_mul(4)),
                ..machine_limits(&params.limits)
            },
        };
        let identity = Identity::draw().map_err(StartError::system)?;
        let source = (Source::new(config, Duration::ZERO), identity, custody, tracking);
        let mut shared =
            Shared::new(guest_source, (to.clone(), facts), params, capabilities, observer, source);
        shared.protecting = protecting;
        let shared = Arc::new(shared);
        let hook = shared.params.lock().on_thread_start.clone();
        hooked(hook.as_ref(), || control::spawn(&shared)).map_err(StartError::system)?;
        Ok(Self { shared })
    }
}
