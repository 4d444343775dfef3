//! The source: a guest leaves.
//!
//! One control thread ([`control`]) performs what the handover machine of `sterna-proto` asks for; one
//! thread per lane sends pages; one reads the return path. Whoever learns something feeds the machine
//! through [`shared`], so that the machine alone decides what came first.

mod ask;
mod control;
mod convergence;
mod converging;
mod counters;
mod figures;
mod file;
mod lane;
mod limiter;
mod main_lane;
pub(crate) mod main_stream;
mod multifd_lane;
pub(crate) mod origin;
mod pace;
mod returns;
mod rounds;
mod setup;
mod shared;
mod streams;
mod switchover;
mod throughput;

use std::sync::Arc;

use sterna_proto::source::{Config, Event as Fed, Source, State, SwitchoverAck};
use sterna_ram::{Custody, PoisonedPage};
use sterna_transport::{Address, TlsEndpoint};

pub use sterna_proto::source::{Decision, Refusal};

use crate::error::{MigrationError, VmError};
use crate::events::{Observer, Status};
use crate::identity::Identity;
use crate::order::Clause;
use crate::params::{Capabilities, Compression, Parameters, WaitLimits};
use crate::settings_error::SettingsError;
use crate::stats::Statistics;
use crate::vm::SourceVm;
use origin::{LiveVm, Origin};
use shared::{Shared, lock};

/// An outgoing migration. Cloning gives another handle to the same one; dropping all handles does not end it.
#[derive(Clone)]
pub struct Migration {
    shared: Arc<Shared>,
}

/// How a migration ended at the source.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// The destination has the guest.
    Completed,
    /// Cancelled; the guest is here, as it was.
    Cancelled,
    /// Failed; the guest is here, as it was, unless [`Outcome::Failed::held`].
    Failed {
        /// Why.
        error: MigrationError,
        /// The guest could not be brought back to how it was and is held stopped; [`Migration::retry`].
        held: bool,
    },
}

/// Why a migration cannot start. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The guest is not free to be migrated: another migration has to do with it, or it is not here.
    #[error("{}", not_free(*.0))]
    Guest(Custody),
    /// The guest's writes are tracked by somebody else.
    #[error(
        "this guest's writes are tracked already, by a migration or by a measurement of its dirty rate: wait for its \
         end, or cancel it"
    )]
    Tracked,
    /// A parameter or capability makes no sense, or does not go with another.
    #[error("{0}")]
    Settings(String),
    /// The image that is to be sent cannot be restored by anybody.
    #[error("{0}")]
    Image(String),
    /// The image that is to be sent is damaged; [`SendOptions::force_damaged`](crate::foreign::SendOptions::force_damaged)
    /// sends it as it is.
    #[error("{0}")]
    DamagedImage(String),
    /// Pages of guest RAM have failed, and what they held cannot be moved.
    #[error(
        "this guest has memory that has failed (poisoned): {}. Restart it, which gives it other memory, then migrate",
        crate::error::name_pages(pages, None)
    )]
    Poisoned {
        /// Where they are.
        pages: Vec<PoisonedPage>,
    },
    /// The operating system refused a thread or a socket.
    #[error("{0}")]
    System(String),
}

/// Why a held guest is not brought back. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RetryError {
    /// No guest is held.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The operating system refused a thread.
    #[error("{0}; try again")]
    System(String),
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
        Self::begin(Arc::new(LiveVm::new(vm)), to, params, capabilities, observer, None)
    }

    /// As [`Migration::start`], with one clause of the page order violated: for proving that the guests'
    /// checker notices.
    ///
    /// # Errors
    /// As [`Migration::start`].
    #[cfg(feature = "planted-faults")]
    pub fn start_violating(
        clause: Clause,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        Self::begin(Arc::new(LiveVm::new(vm)), to, params, capabilities, observer, Some(clause))
    }

    /// Where it stands.
    pub fn status(&self) -> Status {
        lock(&self.shared.figures).status()
    }

    /// Its figures now.
    pub fn statistics(&self) -> Statistics {
        let error = self.shared.error().map(|error| error.to_string());
        let figures = lock(&self.shared.figures);
        // What went wrong on the way (a lost acknowledgement) is over when it has completed.
        let error = error.filter(|_| figures.status() != Status::Completed);
        let streams = lock(&self.shared.streams).as_ref().map(|streams| streams.statistics());
        Statistics {
            streams: streams.unwrap_or_default(),
            ..figures.snapshot(self.shared.counters.now(), error)
        }
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

    /// Changes parameters while it runs: those that [`Parameters`] calls live.
    ///
    /// # Errors
    /// [`SettingsError::NotLive`] if another was to change. Nothing was changed then.
    pub fn set_live(&self, change: impl FnOnce(&mut Parameters)) -> Result<(), SettingsError> {
        let mut params = lock(&self.shared.params);
        let mut wanted = params.clone();
        change(&mut wanted);
        *params = wanted.for_running(&params)?;
        self.shared.limiter.set(params.max_bandwidth_bytes);
        Ok(())
    }

    /// Ends an undecided migration by an operator's word: who runs the guest.
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::Undecided`].
    pub fn decide(&self, decision: Decision) -> Result<(), Refusal> {
        self.shared.feed(Fed::OperatorDecides(decision))?;
        if let Some(asking) = &*lock(&self.shared.asking) {
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

    /// Waits for the end. An undecided migration ends only when the destination answers or an operator decides.
    pub fn wait(&self) -> Outcome {
        self.shared.wait()
    }

    /// Starts to migrate what `origin` has.
    pub(crate) fn begin(
        origin: Arc<dyn Origin>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        violated: Option<Clause>,
    ) -> Result<Self, StartError> {
        check(to, &params, &capabilities)?;
        let mut capabilities = capabilities;
        if matches!(to, Address::File { .. }) {
            if !origin.is_in_memory() {
                return Err(StartError::Settings(
                    "an image goes into another file by converting it".to_owned(),
                ));
            }
            // A file does not answer.
            capabilities.return_path = false;
        }
        let (vm, ram) = (origin.vm(), origin.ram());
        check_throttle(vm.as_ref(), &capabilities)?;
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
            switchover_ack: ack_form(&capabilities, &vm.machine_type()),
            limits: sterna_proto::Limits {
                switchover: params.limits.switchover.max(params.downtime_limit.saturating_mul(4)),
                ..machine_limits(&params.limits)
            },
        };
        let identity = Identity::draw().map_err(|error| StartError::System(error.to_string()))?;
        let source = (Source::new(config, std::time::Duration::ZERO), identity, custody, tracking);
        let shared = Shared::new(origin, to.clone(), params, capabilities, observer, source, violated);
        let shared = Arc::new(shared);
        control::spawn(&shared).map_err(|error| StartError::System(error.to_string()))?;
        Ok(Self { shared })
    }
}

/// Why a guest cannot be migrated (or another taken in), and what to do first.
fn not_free(custody: Custody) -> &'static str {
    match custody {
        Custody::Free => "no migration has to do with this VM's guest",
        Custody::Arrived => {
            "a migration has brought a guest into this VM, and another would take its place: use another VM; a VMM that \
             has discarded its guest says so with GuestRam::has_no_guest"
        }
        Custody::Leaving { .. } => {
            "this VM is being migrated already: cancel that migration, or wait for its end"
        }
        Custody::Undecided => {
            "this VM's guest was handed over and nobody knows yet whether the destination runs it: wait for its answer, \
             or end that migration with Migration::decide"
        }
        Custody::Held => {
            "this VM's guest is held stopped, since its last migration could not give it back: mend what that one \
             names, then bring the guest back with Migration::retry"
        }
        Custody::Saved => {
            "this VM's guest was saved to a file: let it run on here with Migration::resume_saved first, or load the \
             file elsewhere"
        }
        Custody::Gone => "this VM's guest has moved to its destination: migrate it from there",
        Custody::Arriving { .. } => {
            "a migration brings a guest into this VM: wait for its end (a guest that is held is started with \
             Incoming::release)"
        }
        Custody::NoGuest => {
            "this VM has no guest, since the migration that was to bring it has failed: wait for another; a VMM that has \
             booted a new one says so with GuestRam::has_new_guest"
        }
        Custody::Replaced => {
            "the guest's memory was changed while the migration began (GuestRam::with_blocks): start the migration again"
        }
    }
}

fn check(to: &Address, params: &Parameters, capabilities: &Capabilities) -> Result<(), StartError> {
    let refuse = |rule: &str| Err(StartError::Settings(rule.to_owned()));
    if capabilities.multifd && params.multifd_channels == 0 {
        return refuse("multifd-channels is 0: give 1 to 255, or switch multifd off");
    }
    let is_file = matches!(to, Address::File { .. });
    if is_file && capabilities.multifd && !capabilities.mapped_ram {
        return refuse("Migration requires multi-channel URIs: switch multifd off, or mapped-ram on");
    }
    if is_file && params.tls.is_some() {
        return refuse("a file speaks no TLS: leave tls-creds empty");
    }
    if is_file && capabilities.switchover_ack {
        return refuse(
            "switchover-ack needs a destination that answers, which a file does not: switch it off",
        );
    }
    if capabilities.mapped_ram && !is_file {
        return refuse("Migration requires seekable transport (e.g. file:) with mapped-ram: switch it off");
    }
    if capabilities.mapped_ram && capabilities.multifd && params.multifd_compression != Compression::None {
        return refuse("Cannot use compression with mapped-ram: set multifd-compression to none");
    }
    if capabilities.multifd && to.is_descriptor() {
        return refuse("a descriptor (fd:) is one channel: switch multifd off, or give tcp: or unix:");
    }
    if params.tls.as_ref().is_some_and(|tls| tls.credentials.endpoint() != TlsEndpoint::Client) {
        return refuse(
            "tls-creds are for the endpoint server, and a source connects: give it ones for client",
        );
    }
    if capabilities.auto_converge && capabilities.dirty_limit {
        return refuse("dirty-limit conflicts with auto-converge: switch one of them off");
    }
    if capabilities.switchover_ack && !capabilities.return_path {
        return refuse("switchover-ack needs return-path: the acknowledgement comes on it");
    }
    Ok(())
}

/// What is asked for must be there: else a guest that does not converge would go on as if nothing had been said.
fn check_throttle(vm: &dyn SourceVm, capabilities: &Capabilities) -> Result<(), StartError> {
    let refuse = |rule: &str| Err(StartError::Settings(rule.to_owned()));
    let throttle = vm.throttle();
    if capabilities.auto_converge && throttle.is_none() {
        return refuse("this VM cannot be slowed down: switch auto-converge off");
    }
    if capabilities.dirty_limit && !throttle.is_some_and(|throttle| throttle.can_limit_dirty_rate()) {
        return refuse(
            "dirty-limit needs a VM that counts what each vCPU dirties: start it with a dirty ring \
             (dirty-ring-size), or use auto-converge",
        );
    }
    Ok(())
}

/// Which form of `switchover-ack` the machine type's version asks for (specs/stream.md §5.3).
pub(crate) fn ack_form(capabilities: &Capabilities, machine_type: &str) -> SwitchoverAck {
    if !capabilities.switchover_ack {
        return SwitchoverAck::Off;
    }
    if crate::machine_type::acknowledges_in_old_form(machine_type) {
        SwitchoverAck::Legacy
    } else {
        SwitchoverAck::Modern
    }
}

pub(crate) fn machine_limits(limits: &WaitLimits) -> sterna_proto::Limits {
    sterna_proto::Limits {
        setup: limits.setup,
        switchover: limits.switchover,
        prepare: limits.prepare,
        commit: limits.stall,
        acknowledge: limits.acknowledge,
        ask: limits.acknowledge,
        ask_interval: limits.ask_interval,
        // The destination's waits mirror the source's: it has given up when the source tries again.
        load: limits.prepare,
        prepared: limits.prepare,
        reacquire: limits.prepare.saturating_mul(3) / 2,
        ..sterna_proto::Limits::default()
    }
}

/// How long `state` may last.
fn limit_of(state: State, limits: &WaitLimits) -> std::time::Duration {
    let limits = machine_limits(limits);
    match state {
        State::Setup | State::Identifying | State::Comparing => limits.setup,
        State::Stopping | State::Releasing => limits.stop,
        State::Switchover => limits.switchover,
        State::Preparing => limits.prepare,
        State::Committing => limits.commit,
        _ => limits.acknowledge,
    }
}

fn status_of(state: State) -> Status {
    match state {
        State::Setup | State::Identifying | State::Comparing => Status::Setup,
        State::Active | State::Stopping => Status::Active,
        State::PreSwitchover => Status::PreSwitchover,
        State::Releasing | State::Switchover | State::Preparing | State::Committing | State::AwaitingAck => {
            Status::Device
        }
        State::Undecided => Status::Undecided,
        State::Cancelling => Status::Cancelling,
        State::Failing => Status::Failing,
        State::Completed => Status::Completed,
        State::Cancelled => Status::Cancelled,
        State::Held | State::Failed => Status::Failed,
    }
}
