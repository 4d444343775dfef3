//! Implements the monitor's interface with Sterna's own engine.

use std::sync::Arc;

use sterna::{
    Address, Capabilities, Decision, Incoming, IncomingStatistics, LiveSave, LiveSaveOptions, Migration,
    Observer, Parameters, Recording, SourceVm, StartError, Statistics, Status, TargetVm,
};
use sterna_standby::{Guardians, Primary, ProtectError, Standby, StandbyOptions, VmSurvivor, new_protection};

use super::engine::{Engine, GuestAt, Outgoing, Protecting, Receiving};
use super::protected::{self, ProtectedGuest, StandbyVm};
use super::protection::{ProtectionMeans, Side};

/// The engine that moves guests.
#[derive(Debug, Clone, Copy, Default)]
pub struct SternaEngine;

impl Engine for SternaEngine {
    fn start_outgoing(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError> {
        Ok(Arc::new(Migration::start(vm, to, parameters, capabilities, observer)?))
    }

    fn start_incoming(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, StartError> {
        Ok(Arc::new(Incoming::listen(vm, at, parameters, capabilities, observer)?))
    }

    fn start_live_save(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        options: LiveSaveOptions,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError> {
        let capabilities = Capabilities::default();
        Ok(Arc::new(LiveSave::start(vm, to, parameters, capabilities, options, observer)?))
    }

    fn start_protected(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        protecting: Protecting,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, String> {
        let Protecting { means, options, generation, cancel } = protecting;
        let decide = means.decide.clone();
        let protection = new_protection(generation).map_err(|error| error.to_string())?;
        let guardians = Guardians {
            protection,
            secret: means.secret.clone(),
            claims: (means.claims)(Side::Primary, protection),
            gate: Arc::clone(&means.gate),
        };
        let primary =
            Primary::protect_unless(vm, to, &options, guardians, parameters, capabilities, observer, &cancel);
        let primary = primary.map_err(|error| match error {
            ProtectError::Start(error) => super::refusal::sentence(&error),
            error => error.to_string(),
        });
        let primary = primary?;
        let has_watchdog = means.watchdog.is_some();
        if let Some(watchdog) = means.watchdog
            && let Err(error) = primary.arm(watchdog)
        {
            // No checkpoint is held yet, so this ends the protection on both sides.
            let _ = primary.unprotect();
            return Err(error.to_string());
        }
        Ok(Arc::new(ProtectedGuest(primary, decide, generation, has_watchdog)))
    }

    fn start_standby(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        (means, options): (ProtectionMeans, StandbyOptions),
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, String> {
        let refused = |error: StartError| super::refusal::sentence(&error);
        let say_again = Arc::clone(&means.say_again);
        let survivor = VmSurvivor::new(vm).map_err(refused)?;
        let survivor = Arc::new(survivor.saying_again(move |position, bytes| say_again(position, bytes)));
        let rules = Some(protected::rules(&means));
        let standby = Standby::protect(at, &options, parameters, capabilities, observer, survivor, rules);
        Ok(Arc::new(StandbyVm::new(standby.map_err(refused)?, means.decide.clone())))
    }
}

impl Outgoing for Migration {
    fn status(&self) -> Status {
        Migration::status(self)
    }

    fn statistics(&self) -> Statistics {
        Migration::statistics(self)
    }

    fn recording(&self) -> Option<Recording> {
        Migration::recording(self)
    }

    fn cancel(&self) -> Result<(), String> {
        Migration::cancel(self).map_err(sentence)
    }

    fn continue_switchover(&self) -> Result<(), String> {
        Migration::continue_switchover(self).map_err(sentence)
    }

    fn start_postcopy(&self) -> Result<(), String> {
        Migration::start_postcopy(self).map_err(sentence)
    }

    fn resume(&self, to: &Address) -> Result<(), String> {
        Migration::resume(self, to).map_err(sentence)
    }

    fn pause(&self) -> Result<(), String> {
        Migration::pause(self).map_err(sentence)
    }

    fn set_live(&self, parameters: &Parameters) {
        // Only live settings are applied, and these are never refused.
        let _ = Migration::set_live(self, |running| running.take_live(parameters));
    }

    fn retry(&self) -> Result<(), String> {
        Migration::retry(self).map_err(sentence)
    }

    fn resume_saved(&self) -> Result<(), String> {
        Migration::resume_saved(self).map_err(sentence)
    }

    fn decide(&self, guest_at: GuestAt, seen: Option<Status>) -> Result<(), String> {
        let decision = match guest_at {
            GuestAt::Source => Decision::SourceRuns,
            GuestAt::Destination => Decision::DestinationRuns,
        };
        match seen {
            Some(seen) => self.decide_seen(decision, seen),
            None => Migration::decide(self, decision),
        }
        .map_err(sentence)
    }
}

impl Outgoing for LiveSave {
    fn status(&self) -> Status {
        LiveSave::status(self)
    }

    fn statistics(&self) -> Statistics {
        LiveSave::statistics(self)
    }

    fn recording(&self) -> Option<Recording> {
        None
    }

    fn cancel(&self) -> Result<(), String> {
        // A save that has ended needs no cancel.
        LiveSave::cancel(self);
        Ok(())
    }

    fn continue_switchover(&self) -> Result<(), String> {
        Err(STAYS.to_owned())
    }

    fn set_live(&self, parameters: &Parameters) {
        // The save has its own limit of the bandwidth, so only a change of the others would be refused.
        let _ = parameters;
    }

    fn retry(&self) -> Result<(), String> {
        Err(STAYS.to_owned())
    }

    fn decide(&self, _: GuestAt, _: Option<Status>) -> Result<(), String> {
        Err(STAYS.to_owned())
    }

    fn live_save(&self) -> Option<&LiveSave> {
        Some(self)
    }
}

const STAYS: &str = "a live save does not move the guest: it runs here";

impl Receiving for Incoming {
    fn address(&self) -> Address {
        Incoming::address(self)
    }

    fn status(&self) -> Status {
        Incoming::status(self)
    }

    fn statistics(&self) -> IncomingStatistics {
        Incoming::statistics(self)
    }

    fn cancel(&self, force: bool) -> Result<(), String> {
        if force { self.discard() } else { Incoming::cancel(self) }.map_err(sentence)
    }

    fn recover_at(&self, at: &Address) -> Result<(), String> {
        Incoming::recover_at(self, at).map_err(sentence)
    }

    fn pause(&self) -> Result<(), String> {
        Incoming::pause(self).map_err(sentence)
    }

    fn set_autostart(&self, on: bool) -> bool {
        Incoming::set_autostart(self, on)
    }

    fn release(&self) -> Result<(), String> {
        Incoming::release(self).map_err(sentence)
    }
}

fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}
