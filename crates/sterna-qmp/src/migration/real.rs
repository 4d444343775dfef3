//! Sterna's own engine behind the seam.

use std::sync::Arc;

use sterna::{
    Address, Capabilities, Decision, Incoming, IncomingStatistics, Migration, Observer, Parameters,
    Recording, SourceVm, StartError, Statistics, Status, TargetVm,
};

use super::engine::{Engine, GuestAt, Outgoing, Receiving};

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

    fn set_live(&self, parameters: &Parameters) {
        // The engine takes those that are live.
        // Only live settings are taken over, which are never refused.
        let _ = Migration::set_live(self, |running| running.take_live(parameters));
    }

    fn retry(&self) -> Result<(), String> {
        Migration::retry(self).map_err(sentence)
    }

    fn resume_saved(&self) -> Result<(), String> {
        Migration::resume_saved(self).map_err(sentence)
    }

    fn decide(&self, guest_at: GuestAt) -> Result<(), String> {
        let decision = match guest_at {
            GuestAt::Source => Decision::SourceRuns,
            GuestAt::Destination => Decision::DestinationRuns,
        };
        Migration::decide(self, decision).map_err(sentence)
    }
}

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
