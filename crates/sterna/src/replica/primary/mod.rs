//! The primary: a guest of this process that a standby protects.
//!
//! It joins three parts. The migration to the standby seeds it and carries checkpoints ([`crate::outgoing`]). The contact decides who may
//! run the guest ([`super::contact`]). The gate holds what the guest says until its checkpoint is held ([`EpochGate`]).

mod gate;
mod guest;
mod overseer;
mod statistics;

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::replica::primary::{self, Event, Outcome, Refusal, State};
use sterna_transport::{Address, CancelFlag, Channel};

pub use gate::{ByteGate, EpochGate, GateStatistics, JoinedGate, MaySay, NoOutput, PacketGate, PacketLane};
pub use statistics::{DeltaStatistics, PrimaryStatistics};

use super::contact::{
    Claims, ContactError, ContactState, Greeting, PrimaryContact, Protection, Secret, Terms,
};
use crate::events::Observer;
use crate::outgoing::Migration;
use crate::outgoing::protection::{
    CheckpointCopy, CheckpointMode, MOST_IN_FLIGHT, Pace, Protecting, Staging,
};
use crate::params::{Capabilities, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::threads;
use crate::vm::SourceVm;
use guest::ProtectedGuest;
use overseer::PrimaryOverseer;

/// No interval between checkpoints is shorter.
pub const LEAST_CHECKPOINT_DELAY: Duration = Duration::from_millis(1);

/// How a guest is protected. Later versions add fields: write it with `..PrimaryOptions::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrimaryOptions {
    /// `x-checkpoint-delay`: from the beginning of a checkpoint to that of the next. May change later
    /// ([`Primary::set_checkpoint_delay`]).
    pub checkpoint_delay: Duration,
    /// `x-sterna-checkpoint-mode`: what else decides when a checkpoint is taken. May change later ([`Primary::set_checkpoint_mode`]).
    pub checkpoint_mode: CheckpointMode,
    /// `x-sterna-checkpoints-in-flight`: so many checkpoints, 1 to [`MOST_IN_FLIGHT`], may be taken and not be held yet. They share the
    /// buffer. May change later ([`Primary::set_checkpoints_in_flight`]).
    pub checkpoints_in_flight: u8,
    /// `x-sterna-checkpoint-buffer-size`: the most bytes of pages that are copied while the guest stands. If a checkpoint's pages do not fit
    /// beside those that travel, it is taken later; if they do not fit alone, the guest stands until they are sent. Memory is taken only as
    /// it is needed.
    pub buffer_bytes: u64,
    /// `x-sterna-checkpoint-copy`: whether pages are copied while the guest stands or when it goes on. May change later
    /// ([`Primary::set_checkpoint_copy`]).
    pub checkpoint_copy: CheckpointCopy,
    /// The times that both sides agree on.
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

/// Who gives the guest's protection its name, its secret, its claims and its gate.
pub struct Guardians {
    /// Names this protection. The generation is higher by one than that of the guest's protection before.
    pub protection: Protection,
    /// What both sides know.
    pub secret: Secret,
    /// The arbiter's claim of the generation, for this side.
    pub claims: Arc<dyn Claims>,
    /// Holds what the guest says.
    pub gate: Arc<dyn EpochGate>,
}

/// Why a guest is not protected. It runs on as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectError {
    /// The migration that seeds the standby could not begin.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The standby could not be greeted.
    #[error(transparent)]
    Contact(#[from] ContactError),
}

impl From<SettingsError> for ProtectError {
    fn from(error: SettingsError) -> Self {
        Self::Start(error.into())
    }
}

/// A guest's protection, at its primary. Cloning gives another handle; dropping all handles does not end it.
#[derive(Clone)]
pub struct Primary {
    migration: Migration,
    contact: PrimaryContact,
    protecting: Arc<Protecting>,
    gate: Arc<dyn EpochGate>,
}

impl Primary {
    /// Protects `vm`'s guest by the standby at `to`: greets it, seeds it, and takes checkpoints from then on. Returns when the standby was
    /// greeted.
    ///
    /// `params` and `capabilities` are those of a migration. TLS authenticates the standby; `capabilities` must have the return path.
    ///
    /// # Errors
    /// [`ProtectError`]: the guest runs on as before.
    pub fn protect(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        options: &PrimaryOptions,
        guardians: Guardians,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, ProtectError> {
        check(options)?;
        Migration::check_protected(to, &params, &capabilities, vm.as_ref())?;
        let (tls, limit) = (params.tls.as_ref(), params.limits.setup);
        let contact = Channel::connect_with(to, tls, limit, &CancelFlag::new(), Arc::new);
        let contact = contact.map_err(ContactError::from)?;
        Self::protect_over(&contact, vm, to, options, guardians, params, capabilities, observer)
    }

    /// As [`Primary::protect`], in contact over a connection to the standby that the caller has opened.
    ///
    /// # Errors
    /// As [`Primary::protect`].
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
        let Guardians { protection, secret, claims, gate } = guardians;
        check(options)?;
        Migration::check_protected(to, &params, &capabilities, vm.as_ref())?;
        let staging = Staging::new(&vm.ram(), options.buffer_bytes)
            .map_err(|error| StartError::System(error.to_string()))?;
        staging.set_way(options.checkpoint_copy);
        let guest = Arc::new(ProtectedGuest::new(Arc::clone(&gate)));
        let asked = Arc::downgrade(&guest);
        gate.ask_when_full(Arc::new(move || {
            if let Some(guest) = asked.upgrade() {
                guest.want_checkpoint(false);
            }
        }));
        // The pace keeps the number. What has arrived may not be answered yet.
        let in_flight = u64::from(MOST_IN_FLIGHT) + 1;
        let config = primary::Config { protection, terms: options.terms, in_flight };
        // Records of the main channel have a form that every standby knows.
        let sends_differences = capabilities.xbzrle && capabilities.multifd;
        let greeting = Greeting { needs_fence: false, sends_differences };
        let contact = PrimaryContact::begin_as(channel, config, greeting, &secret, guest.clone(), claims)?;
        let overseer = PrimaryOverseer::new(contact.clone(), &guest, Arc::clone(&gate));
        let pace = Pace {
            delay: options.checkpoint_delay,
            mode: options.checkpoint_mode,
            in_flight: options.checkpoints_in_flight,
        };
        let protecting = Arc::new(Protecting::new(Arc::new(overseer), staging, pace));
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
        let this = Self { migration, contact, protecting, gate };
        this.watch()?;
        Ok(this)
    }

    /// Where it stands.
    pub fn state(&self) -> ContactState<State, Outcome> {
        self.contact.state()
    }

    /// The migration that seeds the standby and carries the checkpoints.
    pub fn migration(&self) -> &Migration {
        &self.migration
    }

    /// What it counts, now.
    pub fn statistics(&self) -> PrimaryStatistics {
        let (protecting, pace) = (&self.protecting, *self.protecting.pace.lock());
        let (held, output) = (self.contact.held(), self.gate.statistics());
        let copies = protecting.staging.copy_counts();
        let counts = (&*protecting.counts.lock(), &*protecting.deltas, &copies);
        PrimaryStatistics::of(counts, &pace, held, output)
    }

    /// Changes the interval between checkpoints, and asks for one at once, as QEMU does.
    ///
    /// # Errors
    /// [`SettingsError::CheckpointDelay`]: it is too short.
    pub fn set_checkpoint_delay(&self, delay: Duration) -> Result<(), SettingsError> {
        check_delay(delay)?;
        self.protecting.pace.lock().delay = delay;
        self.checkpoint_now();
        Ok(())
    }

    /// Changes what decides when a checkpoint is taken.
    pub fn set_checkpoint_mode(&self, mode: CheckpointMode) {
        self.protecting.pace.lock().mode = mode;
        self.migration.nudge();
    }

    /// Changes how many checkpoints may be taken and not be held yet.
    ///
    /// # Errors
    /// [`SettingsError::CheckpointsInFlight`]: none, or too many.
    pub fn set_checkpoints_in_flight(&self, in_flight: u8) -> Result<(), SettingsError> {
        check_in_flight(in_flight)?;
        self.protecting.pace.lock().in_flight = in_flight;
        self.migration.nudge();
        Ok(())
    }

    /// Changes whether pages of checkpoints are copied while the guest stands or when it goes on, from the next one on.
    pub fn set_checkpoint_copy(&self, way: CheckpointCopy) {
        self.protecting.staging.set_way(way);
    }

    /// Why pages of checkpoints are copied while the guest stands, where the setting would have it otherwise.
    pub fn why_copied(&self) -> Option<String> {
        self.protecting.staging.copy_counts().why_copied
    }

    /// Asks for a checkpoint at once.
    pub fn checkpoint_now(&self) {
        self.protecting.want(false);
        self.migration.nudge();
    }

    /// Ends the protection with the guest here. The standby is asked for its last word; [`Primary::wait`] says what came of it.
    ///
    /// # Errors
    /// [`Refusal`] when the protection is over, or the standby may have the guest.
    pub fn unprotect(&self) -> Result<(), Refusal> {
        self.contact.unprotect()
    }

    /// Hands the guest over to the standby as planned, with a last checkpoint. Nothing that the guest said is lost.
    ///
    /// # Errors
    /// [`Refusal`] unless the guest is protected.
    pub fn hand_over(&self) -> Result<(), Refusal> {
        self.contact.hand_over()
    }

    /// Waits for the end of the protection, and until this side has done what follows from it.
    pub fn wait(&self) -> Outcome {
        let outcome = self.contact.wait();
        self.migration.wait();
        outcome
    }

    /// Whatever ends first ends the other.
    fn watch(&self) -> Result<(), ProtectError> {
        let spawn = |name: &str, act: Box<dyn FnOnce(Self) + Send>| {
            let this = self.clone();
            threads::spawn(name, move || act(this), |_| {})
        };
        let begun = spawn("protection's end", Box::new(|this| this.end_with_contact()))
            .and_then(|_| spawn("seeding's end", Box::new(|this| this.end_with_migration())));
        if let Err(error) = begun {
            self.contact.failed(&error, Event::LocalFailure);
            self.migration.end_protection(true);
            return Err(StartError::System(error.to_string()).into());
        }
        Ok(())
    }

    fn end_with_contact(&self) {
        let outcome = self.contact.wait();
        self.migration.end_protection(matches!(outcome, Outcome::Alone(_) | Outcome::Failed(_)));
    }

    /// A seeding that fails is no protection.
    fn end_with_migration(&self) {
        let ended = self.migration.wait();
        if self.contact.state().outcome.is_none() {
            let why = match ended {
                crate::Outcome::Completed => "the seeding ended without a protection".to_owned(),
                crate::Outcome::Cancelled => "the seeding was cancelled".to_owned(),
                crate::Outcome::Failed { error, held: false } => format!("the seeding failed: {error}"),
                crate::Outcome::Failed { error, held: true } => {
                    format!("the seeding failed, and the guest is held stopped: {error}")
                }
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
