//! The monitor's commands.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::report::StandbyReport;
use crate::error::QmpError;
use crate::server::{ArgumentKind, CommandSpec, Context, Handler};

/// What an operator wants when a guest is to be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Takeover {
    /// The primary makes a last checkpoint first, and stops its guest.
    pub is_planned: bool,
    /// The operator vouches that the primary's guest does not run, and never will.
    pub vouches: bool,
    /// Into an image, and not into the VM that waits.
    pub into_image: bool,
}

/// What the monitor is about.
pub trait StandbyControl: Send + Sync {
    /// What is to be said now.
    fn report(&self) -> StandbyReport;
    /// The operator wants a takeover, or the step that failed once more. Returns as soon as it is under way.
    ///
    /// # Errors
    /// Why there is none, and what to do.
    fn take_over(&self, wish: Takeover) -> Result<(), String>;
    /// As Ctrl-C.
    fn quit(&self);
}

/// Answers a monitor's clients.
pub struct StandbyMonitor(Arc<dyn StandbyControl>);

impl StandbyMonitor {
    /// The monitor of `standby`.
    pub fn new(standby: Arc<dyn StandbyControl>) -> Arc<Self> {
        Arc::new(Self(standby))
    }

    /// As a QEMU that is a secondary.
    fn colo_status(&self) -> Value {
        match self.0.report().word() {
            "following" => json!({"mode": "secondary", "last-mode": "none", "reason": "none"}),
            "waiting" | "seeding" => json!({"mode": "none", "last-mode": "none", "reason": "none"}),
            _ => json!({"mode": "none", "last-mode": "secondary", "reason": "error"}),
        }
    }

    fn query_migrate(&self) -> Value {
        let report = self.0.report();
        let status = match report.word() {
            "waiting" => return json!({}),
            "seeding" => "active",
            "taken over" => "completed",
            "discarded" | "failed" => "failed",
            _ => "colo",
        };
        match report.trouble().filter(|_| status == "failed") {
            Some(why) => json!({"status": status, "error-desc": why}),
            None => json!({"status": status}),
        }
    }

    fn take_over(&self, wish: Takeover) -> Result<Value, QmpError> {
        self.0.take_over(wish).map(|()| json!({})).map_err(QmpError::generic)
    }
}

impl Handler for StandbyMonitor {
    fn commands(&self) -> Vec<CommandSpec> {
        vec![
            CommandSpec::new("query-status"),
            CommandSpec::new("query-migrate"),
            CommandSpec::new("query-colo-status"),
            CommandSpec::new("x-colo-lost-heartbeat"),
            CommandSpec::new("x-sterna-query-protection"),
            CommandSpec::new("x-sterna-takeover")
                .optional("planned", ArgumentKind::Boolean)
                .optional("vouch", ArgumentKind::Boolean)
                .optional("image", ArgumentKind::Boolean),
            CommandSpec::new("x-sterna-migration-statistics"),
            CommandSpec::new("quit"),
        ]
    }

    fn events(&self) -> Vec<&'static str> {
        vec!["COLO_EXIT"]
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        let flag = |name: &str| arguments.get(name) == Some(&Value::Bool(true));
        match command {
            // No guest runs here.
            "query-status" => Ok(json!({"status": "inmigrate", "running": false})),
            "query-migrate" => Ok(self.query_migrate()),
            "query-colo-status" => Ok(self.colo_status()),
            "x-colo-lost-heartbeat" => self.take_over(Takeover::default()),
            "x-sterna-takeover" => self.take_over(Takeover {
                is_planned: flag("planned"),
                vouches: flag("vouch"),
                into_image: flag("image"),
            }),
            "x-sterna-query-protection" => Ok(self.0.report().to_json()),
            "x-sterna-migration-statistics" => Ok(json!({})),
            "quit" => {
                let standby = Arc::clone(&self.0);
                context.after_reply(move || standby.quit());
                Ok(json!({}))
            }
            _ => Err(QmpError::command_not_found(format!("The command {command} has not been found"))),
        }
    }
}
