//! A guest that gets a standby, and a VM that becomes one.

use std::sync::Arc;

use sterna::{Address, TargetVm, TlsEndpoint};

use super::{ControlState, MigrationControl};
use crate::error::QmpError;
use crate::migration::colo;
use crate::migration::engine::{Protecting, Receiving};
use crate::migration::protection::{Protection, ProtectionMeans};

impl MigrationControl {
    /// `migrate` with `x-colo`.
    pub(super) fn protect(&self, state: &mut ControlState, to: &Address) -> Result<(), QmpError> {
        let means = self.protection_means()?;
        if let Some(reason) = means.unheld.first() {
            return Err(QmpError::generic(format!("This guest cannot be protected: {reason}")));
        }
        let options = state.parameters.primary_options(means.terms);
        // The guest may have come from a protection whose standby this was.
        let came_from = state.incoming.as_deref().and_then(Receiving::protection);
        let last = state.generation.max(came_from.map_or(0, Protection::generation));
        // The other side names that one: it may be any number.
        let generation = last.saturating_add(1);
        let protecting = Protecting { means, options, generation };
        let parameters = state.engine_parameters(to, TlsEndpoint::Client)?;
        let capabilities = state.capabilities.to_engine(true);
        let (vm, observer) = (self.vm.clone(), self.relay.clone());
        let started = self.engine.start_protected(vm, to, protecting, parameters, capabilities, observer);
        let outgoing = started.map_err(QmpError::generic)?;
        state.generation = generation;
        colo::watch_primary(outgoing.clone(), self.vm.clone(), self.relay.bus.clone());
        state.outgoing = Some(outgoing);
        Ok(())
    }

    /// `migrate-incoming` with `x-colo`.
    pub(super) fn stand_by(&self, state: &mut ControlState, at: &Address) -> Result<(), QmpError> {
        let means = self.protection_means()?;
        let options = state.parameters.standby_options(means.is_insecure);
        let parameters = state.engine_parameters(at, TlsEndpoint::Server)?;
        let capabilities = state.capabilities.to_engine(state.autostart);
        let vm: Arc<dyn TargetVm> = self.vm.clone();
        let started =
            self.engine.start_standby(vm, at, (means, options), parameters, capabilities, self.relay.clone());
        let standby = started.map_err(QmpError::generic)?;
        colo::watch_standby(standby.clone(), self.relay.bus.clone());
        state.incoming = Some(standby);
        Ok(())
    }

    fn protection_means(&self) -> Result<ProtectionMeans, QmpError> {
        self.vm.protection().ok_or_else(|| {
            QmpError::generic("This VM can neither be protected nor be a standby: leave 'x-colo' off")
        })
    }
}
