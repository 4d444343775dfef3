//! The primary: protects a guest of this process by a standby.
//!
//! It joins three parts. The migration to the standby seeds it and carries checkpoints ([`sterna::outgoing`]). The
//! contact decides which side may run the guest ([`super::contact`]). The gate keeps the guest's output until its
//! checkpoint is held ([`EpochGate`]).

mod gate;
mod guest;
mod overseer;
mod staging;
mod statistics;

use std::sync::Arc;
use std::time::Duration;

use sterna::SettingsError;
use sterna::StartError;
use sterna::events::Observer;
use sterna::internals::threads::{self, ThreadRole, hooked};
use sterna::internals::{CheckpointMode, MOST_IN_FLIGHT, Pace, Protecting, Staging};
use sterna::outgoing::Migration;
use sterna::params::{Capabilities, Parameters};
use sterna::vm::SourceVm;
use sterna_proto::replica::primary::{self, Event, Outcome, Refusal, State};
use sterna_transport::{Address, CancelFlag, Channel};

pub use gate::{ByteGate, EpochGate, GateStatistics, JoinedGate, MaySay, NoOutput, PacketGate, PacketLane};
pub use staging::CheckpointCopy;
pub use statistics::{DeltaStatistics, PrimaryStatistics};

use super::contact::{
    Claims, ContactError, ContactState, Greeting, PrimaryContact, Protection, Secret, Terms, Watchdog,
};
use guest::ProtectedGuest;
use overseer::PrimaryOverseer;
use staging::CopiedPages;

/// The shortest interval between checkpoints.
pub const LEAST_CHECKPOINT_DELAY: Duration = Duration::from_millis(1);

/// Options of a guest's protection. Later versions add fields: write it with `..PrimaryOptions::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrimaryOptions {
    /// `x-checkpoint-delay`: time from the beginning of a checkpoint to the beginning of the next. Can be changed
    /// later ([`Primary::set_checkpoint_delay`]).
    pub checkpoint_delay: Duration,
    /// `x-sterna-checkpoint-mode`: further conditions for taking a checkpoint. Can be changed later
    /// ([`Primary::set_checkpoint_mode`]).
    pub checkpoint_mode: CheckpointMode,
    /// `x-sterna-checkpoints-in-flight`: number of checkpoints, 1 to [`MOST_IN_FLIGHT`], that may be taken and not be
    /// held yet. They share the buffer. Can be changed later ([`Primary::set_checkpoints_in_flight`]).
    pub checkpoints_in_flight: u8,
    /// `x-sterna-checkpoint-buffer-size`: most bytes of pages that are buffered for checkpoints.
    ///
    /// If a checkpoint's pages do not fit in addition to those in flight, the checkpoint is taken later. If they do
    /// not fit alone, the guest is paused until they are sent. Memory is allocated only as needed.
    pub buffer_bytes: u64,
    /// `x-sterna-checkpoint-copy`: whether pages are copied while the guest is paused, or after it resumes. Can be
    /// changed later ([`Primary::set_checkpoint_copy`]).
    pub checkpoint_copy: CheckpointCopy,
    /// The protection's times, which apply to both sides.
    pub terms: Terms,
}

impl Default for PrimaryOptions {
    fn default() -> Self {
        Self {
            checkpoint_delay: Duration::from_millis(50),
            checkpoint_mode: CheckpointMode::Interval,
            checkpoints_in_flight: 1,
            buffer_bytes: 256 << 20,
            checkpoint_copy: CheckpointCopy::Auto,
            terms: Terms::default(),
        }
    }
}

/// The objects that identify and guard a guest's protection: identity, secret, claims and gate.
pub struct Guardians {
    /// Identity of this protection. Its generation is one higher than the generation of the guest's previous
    /// protection.
    pub protection: Protection,
    /// The secret that both sides know.
    pub secret: Secret,
    /// Access to the arbiter's claim of the generation, for this side.
    pub claims: Arc<dyn Claims>,
    /// Keeps the guest's output until its checkpoint is held.
    pub gate: Arc<dyn EpochGate>,
}

/// Why a guest is not protected. It continues to run as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectError {
    /// The migration that seeds the standby could not begin.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The contact with the standby could not begin.
    #[error(transparent)]
    Contact(#[from] ContactError),
}

impl From<SettingsError> for ProtectError {
    fn from(error: SettingsError) -> Self {
        Self::Start(error.into())
    }
}

/// A guest's protection at its primary. Cloning gives another handle; dropping all handles does not end the
/// protection.
#[derive(Clone)]
pub struct Primary {
    migration: Migration,
    contact: PrimaryContact,
    protecting: Arc<Protecting>,
    staging: Arc<CopiedPages>,
    gate: Arc<dyn EpochGate>,
}

impl Primary {
    /// Protects `vm`'s guest by the standby at `to`: greets it, seeds it, and takes checkpoints from then on. Returns
    /// after the greeting.
    ///
    /// `params` and `capabilities` are the settings of a migration. TLS authenticates the standby; `capabilities`
    /// must include the return path.
    ///
    /// # Errors
    /// [`ProtectError`]: the guest continues to run as before.
    pub fn protect(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        options: &PrimaryOptions,
        guardians: Guardians,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, ProtectError> {
        let cancel = CancelFlag::new();
        Self::protect_unless(vm, to, options, guardians, params, capabilities, observer, &cancel)
    }

    /// Like [`Primary::protect`]. Cancelling `cancel` ends the attempt to connect to the standby.
    ///
    /// # Errors
    /// Like [`Primary::protect`].
    #[expect(clippy::too_many_arguments, reason = "those of `protect`, and what ends it")]
    pub fn protect_unless(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        options: &PrimaryOptions,
        guardians: Guardians,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        cancel: &CancelFlag,
    ) -> Result<Self, ProtectError> {
        check(options)?;
        Migration::check_protected(to, &params, &capabilities, vm.as_ref())?;
        let (tls, limit) = (params.tls.as_ref(), params.limits.setup);
        let connect = || Channel::connect_with(to, tls, limit, cancel, Arc::new);
        let contact = hooked(params.on_thread_start.as_ref(), connect);
        let contact = contact.map_err(ContactError::from)?;
        Self::protect_over(&contact, vm, to, options, guardians, params, capabilities, observer)
    }

    /// Like [`Primary::protect`], with a connection for the contact that the caller has opened.
    ///
    /// # Errors
    /// Like [`Primary::protect`].
    #[expect(clippy::too_many_arguments, reason = "those of `protect`, and the connection")]
    pub fn protect_over(
        channel: &Arc<Channel>,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        options: &PrimaryOptions,
        guardians: Guardians,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, ProtectError> {
        hooked(params.on_thread_start.clone().as_ref(), || {
            Self::begin(channel, vm, to, options, guardians, params, capabilities, observer)
        })
    }

    #[expect(clippy::too_many_arguments, reason = "those of `protect_over`")]
    fn begin(
        channel: &Arc<Channel>,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        options: &PrimaryOptions,
        guardians: Guardians,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, ProtectError> {
        let Guardians { protection, secret, claims, gate } = guardians;
        check(options)?;
        Migration::check_protected(to, &params, &capabilities, vm.as_ref())?;
        let staging = CopiedPages::new(&vm.ram(), options.buffer_bytes).map_err(StartError::system)?;
        let staging = Arc::new(staging);
        staging.set_way(options.checkpoint_copy);
        let guest = Arc::new(ProtectedGuest::new(Arc::clone(&gate)));
        let asked = Arc::downgrade(&guest);
        gate.ask_when_full(Arc::new(move || {
            if let Some(guest) = asked.upgrade() {
                guest.want_checkpoint(false);
            }
        }));
        // The pace enforces the limit. One more, because a checkpoint that has arrived may not be answered yet.
        let in_flight = u64::from(MOST_IN_FLIGHT) + 1;
        let config = primary::Config { protection, terms: options.terms, in_flight };
        // Without multifd, differences are records of the main channel, which every standby understands without an
        // announcement.
        let sends_differences = capabilities.xbzrle && capabilities.multifd;
        let greeting = Greeting { needs_fence: false, sends_differences };
        let contact = PrimaryContact::begin_as(channel, config, greeting, &secret, guest.clone(), claims)?;
        let overseer = PrimaryOverseer::new(contact.clone(), &guest, Arc::clone(&gate));
        let pace = Pace {
            delay: options.checkpoint_delay,
            mode: options.checkpoint_mode,
            in_flight: options.checkpoints_in_flight,
        };
        let protecting =
            Arc::new(Protecting::new(Arc::new(overseer), Arc::clone(&staging) as Arc<dyn Staging>, pace));
        let seeded = Arc::clone(&protecting);
        let begun = Migration::begin_protected(vm, to, params, capabilities, observer, seeded);
        let migration = match begun {
            Ok(migration) => migration,
            Err(error) => {
                contact.failed(&error, Event::LocalFailure);
                return Err(error.into());
            }
        };
        guest.is_of(migration.clone(), Arc::clone(&protecting));
        let this = Self { migration, contact, protecting, staging, gate };
        this.watch()?;
        Ok(this)
    }

    /// The current state, outcome and trouble.
    pub fn state(&self) -> ContactState<State, Outcome> {
        self.contact.state()
    }

    /// The migration that seeds the standby and carries the checkpoints.
    pub fn migration(&self) -> &Migration {
        &self.migration
    }

    /// The current counters.
    pub fn statistics(&self) -> PrimaryStatistics {
        let (protecting, pace) = (&self.protecting, *self.protecting.pace.lock());
        let (held, output) = (self.contact.held(), self.gate.statistics());
        let copies = self.staging.copy_counts();
        let counts = (&*protecting.counts.lock(), &*protecting.deltas, &copies);
        PrimaryStatistics::of(counts, &pace, held, output)
    }

    /// Changes the interval between checkpoints, and requests a checkpoint immediately, as QEMU does.
    ///
    /// # Errors
    /// [`SettingsError::CheckpointDelay`]: the interval is too short.
    pub fn set_checkpoint_delay(&self, delay: Duration) -> Result<(), SettingsError> {
        check_delay(delay)?;
        self.protecting.pace.lock().delay = delay;
        self.checkpoint_now();
        Ok(())
    }

    /// Changes the further conditions for taking a checkpoint.
    pub fn set_checkpoint_mode(&self, mode: CheckpointMode) {
        self.protecting.pace.lock().mode = mode;
        self.migration.nudge();
    }

    /// Changes how many checkpoints may be taken and not be held yet.
    ///
    /// # Errors
    /// [`SettingsError::CheckpointsInFlight`]: the number is 0 or too large.
    pub fn set_checkpoints_in_flight(&self, in_flight: u8) -> Result<(), SettingsError> {
        check_in_flight(in_flight)?;
        self.protecting.pace.lock().in_flight = in_flight;
        self.migration.nudge();
        Ok(())
    }

    /// Changes whether pages are copied while the guest is paused, or after it resumes. Takes effect at the next
    /// checkpoint.
    pub fn set_checkpoint_copy(&self, way: CheckpointCopy) {
        self.staging.set_way(way);
    }

    /// Why pages are copied while the guest is paused, although the setting differs. `None` if the setting is
    /// followed.
    pub fn why_copied(&self) -> Option<String> {
        self.staging.copy_counts().why_copied
    }

    /// Requests a checkpoint immediately.
    pub fn checkpoint_now(&self) {
        self.protecting.want(false);
        self.migration.nudge();
    }

    /// Age of the last held checkpoint, as far as this side knows; `None` before the first.
    pub fn held_for(&self) -> Option<Duration> {
        self.contact.held_for()
    }

    /// Arms a watchdog: it resets this host if the guest still runs after the end of the lease
    /// ([`PrimaryContact::arm`]).
    ///
    /// # Errors
    /// The watchdog cannot be armed. The guest is protected without it.
    pub fn arm(&self, watchdog: Arc<dyn Watchdog>) -> Result<(), ContactError> {
        self.contact.arm(watchdog)
    }

    /// Whether the guest may run here now. A VMM checks this before it resumes the guest at an operator's request.
    /// After the end of the lease, the guest may be running at the standby.
    pub fn may_guest_run(&self) -> bool {
        self.contact.may_guest_run()
    }

    /// Ends the protection; the guest stays here. The standby is asked for its last message. [`Primary::wait`]
    /// returns the outcome.
    ///
    /// # Errors
    /// [`Refusal`] if the protection is over, or the standby may have the guest.
    pub fn unprotect(&self) -> Result<(), Refusal> {
        self.contact.unprotect()
    }

    /// Hands the guest over to the standby as planned, with a last checkpoint. No output of the guest is lost.
    ///
    /// # Errors
    /// [`Refusal`] unless the guest is protected.
    pub fn hand_over(&self) -> Result<(), Refusal> {
        self.contact.hand_over()
    }

    /// Waits until the protection ends, and until this side has performed the consequences.
    pub fn wait(&self) -> Outcome {
        let outcome = self.contact.wait();
        self.migration.wait();
        outcome
    }

    /// Starts two threads, so that the end of the contact ends the migration, and vice versa.
    fn watch(&self) -> Result<(), ProtectError> {
        let spawn = |role: ThreadRole, act: Box<dyn FnOnce(Self) + Send>| {
            let this = self.clone();
            threads::spawn(role, move || act(this), |_| {})
        };
        let begun = spawn(ThreadRole::ProtectionEnd, Box::new(|this| this.end_with_contact()))
            .and_then(|_| spawn(ThreadRole::SeedingEnd, Box::new(|this| this.end_with_migration())));
        if let Err(error) = begun {
            self.contact.failed(&error, Event::LocalFailure);
            self.migration.end_protection(true);
            return Err(StartError::system(error).into());
        }
        Ok(())
    }

    fn end_with_contact(&self) {
        let outcome = self.contact.wait();
        self.migration.end_protection(matches!(outcome, Outcome::Alone(_) | Outcome::Failed(_)));
    }

    /// Ends the contact when the migration ends, because a failed seeding cannot protect the guest.
    fn end_with_migration(&self) {
        let ended = self.migration.wait();
        if self.contact.state().outcome.is_none() {
            let why = match ended {
                sterna::Outcome::Completed => "the seeding ended without a protection".to_owned(),
                sterna::Outcome::Cancelled => "the seeding was cancelled".to_owned(),
                sterna::Outcome::Failed { error, held: false } => format!("the seeding failed: {error}"),
                sterna::Outcome::Failed { error, held: true } => {
                    format!("the seeding failed, and the guest is held stopped: {error}")
                }
                other => format!("the seeding ended: {other:?}"),
            };
            self.contact.failed(why, Event::LocalFailure);
        }
    }
}

fn check(options: &PrimaryOptions) -> Result<(), ProtectError> {
    check_delay(options.checkpoint_delay)?;
    check_in_flight(options.checkpoints_in_flight)?;
    Ok(options.terms.check().map_err(ContactError::from)?)
}

fn check_delay(delay: Duration) -> Result<(), SettingsError> {
    if delay < LEAST_CHECKPOINT_DELAY {
        return Err(SettingsError::CheckpointDelay { least: LEAST_CHECKPOINT_DELAY });
    }
    Ok(())
}

fn check_in_flight(in_flight: u8) -> Result<(), SettingsError> {
    if !(1..=MOST_IN_FLIGHT).contains(&in_flight) {
        return Err(SettingsError::CheckpointsInFlight);
    }
    Ok(())
}
