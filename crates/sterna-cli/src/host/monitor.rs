//! The monitor of a hosted VM: the migration commands, and three of our own about the guest inside.
//!
//! | command | does |
//! | --- | --- |
//! | `x-sterna-check-guest` | stops the guest for a moment and checks that its RAM is one consistent cut |
//! | `x-sterna-query-guest` | how far it has come and how fast it goes, and the longest gap between two of its beats |
//! | `x-sterna-set-guest` | changes its rate; forgets the longest gap |
//!
//! They are for guests of `guests/`, which write their memory by rules; others are refused.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna::{RunState, SourceVm};
use sterna_qmp::server::{ArgumentKind, CommandSpec, Context};
use sterna_qmp::{Handler, MigrationControl, QmpError};

use super::Hosted;

/// Handles all of it.
pub struct GuestMonitor {
    control: Arc<MigrationControl>,
    vm: Arc<Hosted>,
}

impl GuestMonitor {
    /// The monitor of `vm`, whose migrations `control` has.
    pub fn new(control: Arc<MigrationControl>, vm: Arc<Hosted>) -> Arc<Self> {
        Arc::new(Self { control, vm })
    }

    fn check(&self) -> Result<Value, QmpError> {
        let guest = self.vm.guest().map_err(refused)?;
        // By the operator's commands: they refuse while a switchover has the guest.
        let ran = self.vm.run_state() == RunState::Running;
        if ran {
            self.control.stop()?;
        }
        let verdict = guest.check();
        let progress = self.vm.progress();
        if ran {
            self.control.cont()?;
        }
        let verdict = verdict.map_err(refused)?;
        Ok(json!({
            "consistent": verdict.is_consistent(),
            "pages": verdict.pages(),
            "summary": verdict.to_string(),
            "guest": progress.map_err(refused)?,
        }))
    }

    fn set(&self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        let guest = self.vm.guest().map_err(refused)?;
        if let Some(rate) = arguments.get("rate") {
            let rate =
                rate.as_u64().ok_or_else(|| QmpError::expects("rate", "pages per second, not negative"))?;
            guest.set_rate(rate).map_err(refused)?;
        }
        if arguments.get("reset-gap") == Some(&Value::Bool(true)) {
            guest.reset_gap().map_err(refused)?;
        }
        Ok(json!({}))
    }
}

impl Handler for GuestMonitor {
    fn commands(&self) -> Vec<CommandSpec> {
        let mut commands = self.control.commands();
        commands.extend([
            CommandSpec::new("x-sterna-check-guest"),
            CommandSpec::new("x-sterna-query-guest"),
            CommandSpec::new("x-sterna-set-guest")
                .optional("rate", ArgumentKind::Integer)
                .optional("reset-gap", ArgumentKind::Boolean),
        ]);
        commands
    }

    fn events(&self) -> Vec<&'static str> {
        self.control.events()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        match command {
            "x-sterna-check-guest" => self.check(),
            "x-sterna-query-guest" => {
                let progress = self.vm.progress().map_err(refused)?;
                serde_json::to_value(progress).map_err(|error| refused(error.to_string()))
            }
            "x-sterna-set-guest" => self.set(arguments),
            _ => self.control.execute(command, arguments, context),
        }
    }
}

fn refused(why: String) -> QmpError {
    QmpError::generic(why)
}
