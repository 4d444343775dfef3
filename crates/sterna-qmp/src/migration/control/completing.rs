//! `x-sterna-complete-memory`: loads the rest of a guest's memory, for an operation that pauses the guest afterwards.

use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::MigrationError;

use super::MigrationControl;
use crate::error::QmpError;
use crate::server::{Arguments, Context};

impl MigrationControl {
    /// Executes `x-sterna-complete-memory`. The connection keeps the request, so that it ends with its client.
    pub(in crate::migration) fn complete_memory(
        &self,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        let ram = self.vm.ram();
        if Arguments(arguments).flag("stop")? {
            context.completing = None;
        } else {
            if context.completing.is_none() {
                context.completing = ram.complete();
            }
            let waited = context.completing.as_ref().map_or(Ok(true), |wait| wait.wait(Duration::ZERO));
            if !matches!(waited, Ok(false)) {
                context.completing = None;
            }
            waited.map_err(|why| QmpError::generic(MigrationError::NotLoaded(why).to_string()))?;
        }
        Ok(json!({"missing-bytes": ram.missing_bytes()}))
    }
}
