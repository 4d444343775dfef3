//! The source: a guest leaves.
//!
//! One control thread ([`control`]) performs what the handover machine of `sterna-proto` asks for; one
//! thread per lane sends pages; one reads the return path. Whoever learns something feeds the machine
//! through [`shared`], so that the machine alone decides what came first.

mod ask;
mod asking;
mod cause;
mod check;
mod control;
mod file;
pub(crate) mod guest_source;
mod lanes;
mod limits;
mod main_channel;
pub(crate) mod main_stream;
mod measure;
mod outcome;
mod postcopy;
pub(crate) mod protection;
mod rdma;
mod return_path;
mod running_streams;
mod same_host;
mod shared;
mod streams;
mod waits;
mod workers;

use std::sync::Arc;

use sterna_proto::source::{Config, Event as Fed, Source, State};
use sterna_ram::Custody;
use sterna_transport::Address;

pub use outcome::{Outcome, ResumeError, RetryError};
pub use sterna_proto::source::{Decision, Refusal};

use crate::error::VmError;
use crate::events::{Observer, Status};
use crate::identity::Identity;
use crate::limits::machine_limits;
use crate::params::{Capabilities, MigrationMode, Parameters};
use crate::precopy::Recording;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::stats::Statistics;
use crate::vm::SourceVm;
use check::{check, check_postcopy, check_protected, check_resume, check_sharable, check_throttle};
use guest_source::{GuestSource, LiveVm};
use limits::ack_form;
use protection::{Protecting, Withholder};
use same_host::SharedMemory;
use shared::Shared;

/// An outgoing migration. Cloning gives another handle to the same one; dropping all handles does not end it.
#[derive(Clone)]
pub struct Migration {
    shared: Arc<Shared>,
}

impl Migration {
    /// Starts to migrate `vm`'s guest to `to`. Returns at once; a control thread works.
    ///
    /// The guest runs on until the switchover, and runs on for good if anything fails before the commit.
    ///
    /// # Errors
    /// [`StartError::Settings`] for parameters that do not go together, or with `to`; [`StartError::Guest`] unless
    /// the guest is here and no other migration has to do with it ([`Custody`]), with what to do first. A descriptor
    /// that `to` names by its number (`fd:7`) is duplicated and stays its owner's, whatever becomes of the migration.
    /// One that was handed over ([`Address::Handed`]) is the migration's from a start that succeeds on.
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

    /// Where it stands.
    pub fn status(&self) -> Status {
        self.shared.statistics.lock().status()
    }

    /// Its statistics now.
    pub fn statistics(&self) -> Statistics {
        let error = self.shared.error().map(|error| error.to_string());
        let statistics = self.shared.statistics.lock();
        // What went wrong on the way (a lost acknowledgement) is over when it has completed.
        let error = error.filter(|_| statistics.status() != Status::Completed);
        let streams = self.shared.streams.lock().as_ref().map(|streams| streams.statistics());
        let is_rdma = matches!(self.shared.to, Address::Rdma { .. });
        let mut snapshot = statistics.snapshot(self.shared.counters.now(), error);
        let since_start = |instant| statistics.since_start(instant);
        snapshot.postcopy =
            snapshot.postcopy.map(|postcopy| self.shared.postcopy.report(postcopy, since_start));
        Statistics {
            rdma: is_rdma.then(|| self.shared.rdma.now()),
            streams: streams.unwrap_or_default(),
            free_pages: self.shared.counters.free_pages(),
            postcopy_requests: self.shared.postcopy.requests(),
            ..snapshot
        }
    }

    /// What its precopy policy was told, and what it decided; `None` before pages move. Complete once the migration has
    /// ended.
    pub fn recording(&self) -> Option<Recording> {
        self.shared.policy.lock().as_ref().map(|policy| policy.recording().clone())
    }

    /// Ends it; the guest stays here and runs on. From any thread, at any moment.
    ///
    /// # Errors
    /// [`Refusal`] from the commit on: the destination may run the guest already.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::Cancel)
    }

    /// Goes on after `pause-before-switchover` (QMP's `migrate-continue`).
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PreSwitchover`].
    pub fn continue_switchover(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::OperatorContinue)
    }

    /// Lets the guest go on at the destination as soon as possible, before its pages are there (QMP's `migrate-start-postcopy`).
    /// What can be read of its devices' streams while it runs is read before, as long as that gets less; precopy that ends
    /// meanwhile ends the migration.
    ///
    /// # Errors
    /// [`Refusal`] without [`Capabilities::postcopy_ram`], and when the guest is being handed over already.
    pub fn start_postcopy(&self) -> Result<(), Refusal> {
        if !self.shared.capabilities.postcopy_ram {
            return Err(Refusal::NoPostcopy);
        }
        let state = self.shared.driver.inspect(Source::state);
        // Over the next connection, if there is none now.
        let is_lost = matches!(state, State::Suspending | State::Reconnecting);
        if state > State::Active && !is_lost {
            return Err(Refusal::NotActive { state });
        }
        self.shared.postcopy.want();
        self.shared.driver.nudge();
        Ok(())
    }

    /// Goes on over another connection after the one of a postcopy broke (QMP's `migrate` with `resume`): dials the destination at
    /// `to`, learns which pages it has, and sends the others. Returns at once; if it does not succeed, the status is
    /// [`Status::PostcopyPaused`] as before, and this may be called again.
    ///
    /// # Errors
    /// [`ResumeError`] unless the status is [`Status::PostcopyPaused`], and for an address where no destination can be. Nothing
    /// was changed then.
    pub fn resume(&self, to: &Address) -> Result<(), ResumeError> {
        check_resume(to, &self.shared.capabilities)?;
        let shared = &self.shared;
        if shared.driver.inspect(Source::state) == State::PostcopyPaused
            && let Some(asking) = &*shared.asking.lock()
        {
            // It waits for no answer to a question.
            asking.stop();
        }
        let before = shared.recovery.go_to(to.clone());
        shared.feed(Fed::ResumeRequested).map_err(|refusal| {
            shared.recovery.go_to(before);
            refusal.into()
        })
    }

    /// Breaks the connection of a postcopy on purpose (QMP's `migrate-pause`): the guest runs on at the destination until it needs a
    /// page that did not come. Nobody connects again before [`Migration::resume`].
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PostcopyActive`] or [`Status::PostcopyRecover`], or it is
    /// [`Status::PostcopyPaused`] and this side would connect again by itself.
    pub fn pause(&self) -> Result<(), Refusal> {
        self.shared.feed(Fed::PauseRequested)?;
        if let Some(asking) = &*self.shared.asking.lock() {
            asking.stop();
        }
        // Whoever writes to a destination that does not read.
        self.shared.interrupt();
        Ok(())
    }

    /// Changes parameters while it runs: those that [`Parameters`] calls live.
    ///
    /// # Errors
    /// [`SettingsError::NotLive`] if another was to change. Nothing was changed then.
    pub fn set_live(&self, change: impl FnOnce(&mut Parameters)) -> Result<(), SettingsError> {
        let mut params = self.shared.params.lock();
        let mut wanted = params.clone();
        change(&mut wanted);
        *params = wanted.for_running(&params)?;
        self.shared.limiter.set(params.max_bandwidth_bytes);
        self.shared.postcopy.limiter.set(params.max_postcopy_bandwidth_bytes);
        Ok(())
    }

    /// Ends an undecided migration by an operator's word: who runs the guest.
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::Undecided`].
    pub fn decide(&self, decision: Decision) -> Result<(), Refusal> {
        self.shared.feed(Fed::OperatorDecides(decision))?;
        if let Some(asking) = &*self.shared.asking.lock() {
            asking.stop();
        }
        Ok(())
    }

    /// Tries again to bring back a guest that is held stopped because that failed before.
    ///
    /// Waits until the last attempt has ended, so not to be called by the observer; by a thread of the observer's it may
    /// be.
    ///
    /// # Errors
    /// [`RetryError::Refused`] unless the outcome says that the guest is held; [`RetryError::System`] when there is no
    /// thread to do it: the guest is held as before, and this may be tried again.
    pub fn retry(&self) -> Result<(), RetryError> {
        control::retry(&self.shared)
    }

    /// Whether the VMM may let the guest run at its operator's wish: not between the stop for the
    /// switchover and its undoing, and not once the destination has the guest.
    ///
    /// This is about the guest, not about this migration alone: where another migration has followed, the answer is
    /// what that one made of it ([`GuestRam::custody`](sterna_ram::GuestRam::custody)).
    pub fn may_guest_run(&self) -> bool {
        self.shared.ram.custody().may_run()
    }

    /// Runs `act`, an operator's `cont` or `stop`, if the guest is free to run or stop at an operator's
    /// wish ([`Migration::may_guest_run`]); `None`, without running it, if it is not.
    ///
    /// The two cannot be torn apart: the switchover asks for the guest only after `act` has returned, and
    /// no `act` begins once it has asked, until the guest is the operator's again. A VMM that looks first
    /// and acts then could let the guest run while the destination runs it too. The migration makes no
    /// progress meanwhile; `act` must be short and must not call back into this migration. It is
    /// [`GuestRam::while_free`](sterna_ram::GuestRam::while_free), which works without a migration, too.
    pub fn while_guest_is_free<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        self.shared.ram.while_free(act).ok()
    }

    /// Whether the guest was saved to a file, and stands here.
    pub fn is_saved(&self) -> bool {
        file::is_saved(&self.shared)
    }

    /// Lets the guest run again after it was saved to a file: takes its hooks (disks, locks) back and resumes it. The
    /// file is then a snapshot of its past.
    ///
    /// Waits for the end of the migration, so not to be called by its observer; by a thread of the observer's it may be.
    ///
    /// # Errors
    /// Unless this is a migration to a file that has completed; or what the VMM says. The guest stays stopped then.
    pub fn resume_saved(&self) -> Result<(), VmError> {
        file::resume(&self.shared)
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        self.shared.outcome()
    }

    /// The protection that this migration seeds and feeds is over.
    pub(crate) fn end_protection(&self, guest_is_here: bool) {
        let is_protected = self.shared.driver.inspect(|machine| machine.state() == State::Protected);
        if is_protected {
            self.shared.report(Fed::ProtectionEnded { guest_is_here });
        } else if let Err(refusal) = self.cancel() {
            // It has ended by itself.
            tracing::debug!(%refusal, "a seeding");
        }
    }

    /// Stops the guest for whoever decides who runs it.
    pub(crate) fn withhold_guest(&self) -> Result<(), VmError> {
        self.protecting(|shared, protecting| shared.withhold_guest(protecting, Withholder::Overseer))
    }

    /// Undoes [`Migration::withhold_guest`].
    pub(crate) fn give_guest_back(&self) -> Result<(), VmError> {
        self.protecting(|shared, protecting| shared.give_guest_back(protecting, Withholder::Overseer))
    }

    fn protecting(
        &self,
        act: impl FnOnce(&Shared, &Protecting) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        self.shared.protecting.as_ref().map_or(Ok(()), |protecting| act(&self.shared, protecting))
    }

    /// Shuts the channels of a protection down.
    pub(crate) fn close_channels(&self) {
        self.shared.interrupt();
    }

    /// Wakes the control thread, which looks at what has changed.
    pub(crate) fn nudge(&self) {
        self.shared.driver.nudge();
    }

    /// Waits for the end. An undecided migration ends only when the destination answers or an operator decides.
    pub fn wait(&self) -> Outcome {
        self.shared.wait()
    }

    /// Starts to migrate what `origin` has.
    pub(crate) fn begin(
        guest_source: Arc<dyn GuestSource>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        Self::begin_as(guest_source, to, params, capabilities, observer, None)
    }

    /// Whether a guest can be protected so. Looked at before anybody is reached.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check_protected(
        to: &Address,
        params: &Parameters,
        capabilities: &Capabilities,
        vm: &dyn SourceVm,
    ) -> Result<(), StartError> {
        Ok(check_protected(to, params, capabilities, vm)?)
    }

    /// Starts to seed a standby at `to` with `vm`'s guest, which stays here. Checkpoints follow. [`Migration::check_protected`] comes first.
    pub(crate) fn begin_protected(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        protecting: Arc<Protecting>,
    ) -> Result<Self, StartError> {
        let source = Arc::new(LiveVm::new(vm));
        Self::begin_as(source, to, params, capabilities, observer, Some(protecting))
    }

    fn begin_as(
        guest_source: Arc<dyn GuestSource>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        protecting: Option<Arc<Protecting>>,
    ) -> Result<Self, StartError> {
        check(to, &params, &capabilities)?;
        if capabilities.xbzrle && protecting.is_none() {
            return Err(SettingsError::DeltaNeedsStandby.into());
        }
        let mut capabilities = capabilities;
        if matches!(to, Address::File { .. }) {
            if !guest_source.is_in_memory() {
                return Err(SettingsError::ImageIntoFile.into());
            }
            // A file does not answer.
            capabilities.return_path = false;
        }
        if matches!(to, Address::Rdma { .. }) && !guest_source.is_in_memory() {
            return Err(SettingsError::ImageOverRdma.into());
        }
        let (vm, ram) = (guest_source.vm(), guest_source.ram());
        if params.mode == MigrationMode::CprTransfer {
            if !guest_source.is_in_memory() {
                return Err(SettingsError::CprOfImage.into());
            }
            check_sharable(vm.as_ref(), ram)?;
        }
        check_throttle(vm.as_ref(), &capabilities)?;
        let is_live = guest_source.is_in_memory() && protecting.is_none();
        check_postcopy(to, &params, &capabilities, vm.as_ref(), is_live)?;
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
                reconnect: params.reconnect_window,
                switchover: params.limits.switchover.max(params.downtime_limit.saturating_mul(4)),
                ..machine_limits(&params.limits)
            },
        };
        let identity = Identity::draw().map_err(|error| StartError::System(error.to_string()))?;
        let source = (Source::new(config, std::time::Duration::ZERO), identity, custody, tracking);
        let mut shared = Shared::new(guest_source, to.clone(), params, capabilities, observer, source);
        shared.protecting = protecting;
        let shared = Arc::new(shared);
        control::spawn(&shared).map_err(|error| StartError::System(error.to_string()))?;
        Ok(Self { shared })
    }
}
