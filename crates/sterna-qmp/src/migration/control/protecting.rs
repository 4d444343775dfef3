//! Starts protections: a guest gets a standby, or this VM becomes a standby.

use std::sync::Arc;

use sterna::{Address, Capabilities, Parameters, SourceVm, TargetVm};
use sterna_transport::CancelFlag;

use super::MigrationControl;
use crate::error::QmpError;
use crate::migration::colo;
use crate::migration::engine::{Protecting, Receiving};
use crate::migration::protection::{Protection, ProtectionMeans};

impl MigrationControl {
    /// Executes `migrate` with `x-colo`.
    ///
    /// `migrate_cancel` cancels this while it connects to the standby or waits for its greeting.
    pub(super) fn protect(
        &self,
        to: &Address,
        (parameters, capabilities): (Parameters, Capabilities),
    ) -> Result<(), QmpError> {
        let means = self.protection_means()?;
        if let Some(reason) = means.unheld.first() {
            return Err(QmpError::generic(format!("This guest cannot be protected: {reason}")));
        }
        let state = self.state.lock();
        let options = state.parameters.typed().checkpoints.primary_options(means.terms);
        let (incoming, own) = (state.incoming.clone(), state.generation);
        drop(state);
        // The guest may have arrived through a protection in which this VM was the standby.
        let came_from = incoming.as_deref().and_then(Receiving::protection);
        let last = own.max(came_from.map_or(0, Protection::generation));
        // The earlier generation was chosen by the other side, so it may be the maximum.
        let generation = last.saturating_add(1);
        let cancel = CancelFlag::new();
        let protecting = Protecting { means, options, generation, cancel: cancel.clone() };
        let (vm, observer): (Arc<dyn SourceVm>, _) = (self.vm.shared(), self.relay.clone());
        self.state.lock().reaching = Some(cancel);
        let started = self.engine.start_protected(vm, to, protecting, parameters, capabilities, observer);
        self.state.lock().reaching = None;
        let outgoing = started.map_err(QmpError::generic)?;
        colo::watch_primary(outgoing.clone(), self.vm.shared(), self.relay.bus.clone());
        let mut state = self.state.lock();
        state.generation = generation;
        state.outgoing = Some(outgoing);
        Ok(())
    }

    /// Executes `migrate-incoming` with `x-colo`.
    pub(super) fn stand_by(
        &self,
        at: &Address,
        (parameters, capabilities): (Parameters, Capabilities),
    ) -> Result<(), QmpError> {
        let means = self.protection_means()?;
        let options = self.state.lock().parameters.typed().checkpoints.standby_options(means.is_insecure);
        let vm: Arc<dyn TargetVm> = self.vm.shared();
        let started =
            self.engine.start_standby(vm, at, (means, options), parameters, capabilities, self.relay.clone());
        let standby = started.map_err(QmpError::generic)?;
        colo::watch_standby(standby.clone(), self.relay.bus.clone());
        self.state.lock().incoming = Some(standby);
        Ok(())
    }

    fn protection_means(&self) -> Result<ProtectionMeans, QmpError> {
        self.vm.protection().ok_or_else(|| {
            QmpError::generic("This VM can neither be protected nor be a standby: leave 'x-colo' off")
        })
    }
}
