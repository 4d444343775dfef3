//! Commands about the guest's dirty rate: its measurement, and limits for vCPUs.

use std::sync::Arc;

use serde_json::{Map, Value};
use sterna::throttle::Throttle;

use super::MigrationControl;
use crate::error::QmpError;
use crate::migration::dirty_limit;
use crate::migration::dirty_rate::{self, Order};

impl MigrationControl {
    /// Executes `calc-dirty-rate`: starts a measurement of the guest's dirty rate.
    pub(in crate::migration) fn calc_dirty_rate(&self, order: Order) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let (is_measuring, is_migrating) = {
            let state = self.state.lock();
            (state.is_measuring(), state.is_migrating())
        };
        let refusal = if is_measuring {
            "the dirty rate is already being measured."
        } else if is_migrating {
            "A migration tracks the guest's writes: 'query-migrate' shows its dirty-pages-rate"
        } else if !self.vm.has_guest() {
            "Guest is waiting for an incoming migration; it does not run here"
        } else {
            let measuring = Arc::new(order.start(self.vm.shared())?);
            self.state.lock().measuring = Some(measuring);
            return Ok(());
        };
        Err(QmpError::generic(refusal))
    }

    /// The VM's throttle, if it can limit the dirty rates of vCPUs.
    pub(super) fn limiter(&self) -> Option<&dyn Throttle> {
        dirty_limit::limiter(self.vm.throttle())
    }

    /// Executes `set-vcpu-dirty-limit` and, without a `dirty-rate`, `cancel-vcpu-dirty-limit`.
    pub(in crate::migration) fn limit_dirty_rate(
        &self,
        arguments: &Map<String, Value>,
    ) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let is_taken = {
            let state = self.state.lock();
            state.is_migrating() && state.capabilities.get("dirty-limit")
        };
        if is_taken {
            return Err(QmpError::generic(
                "The running migration limits dirty rates itself; set its 'vcpu-dirty-limit'",
            ));
        }
        match arguments.contains_key("dirty-rate") {
            true => dirty_limit::set(self.vm.throttle(), arguments),
            false => dirty_limit::cancel(self.vm.throttle(), arguments),
        }
    }

    /// Answers `query-vcpu-dirty-limit`.
    pub(in crate::migration) fn query_dirty_limits(&self) -> Value {
        dirty_limit::query(self.vm.throttle())
    }

    /// Answers `query-dirty-rate` with the last measurement.
    pub(in crate::migration) fn query_dirty_rate(
        &self,
        arguments: &Map<String, Value>,
    ) -> Result<Value, QmpError> {
        let measuring = self.state.lock().measuring.clone();
        dirty_rate::query(measuring.as_deref(), arguments)
    }
}
