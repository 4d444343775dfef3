//! The commands of a standby's monitor.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::report::StandbyReport;
use crate::error::QmpError;
use crate::migration::declared::{COLO_STATUS, MIGRATION, PROTECTION, STATUS};
use crate::migration::events::COLO_EXIT;
use crate::server::MemberKind::{self, Boolean, Members};
use crate::server::{CommandSpec, Context, EventSpec, Handler, optional};

/// All commands of a standby's monitor, in addition to [`BUILTIN_COMMANDS`](crate::server::BUILTIN_COMMANDS).
#[rustfmt::skip]
pub const COMMANDS: &[CommandSpec] = &[
    CommandSpec::new("query-status", "Returns `inmigrate`: no guest runs here.").returns(Members(STATUS)),
    CommandSpec::new("query-migrate", "Returns the state of the protection, as a QEMU that is a secondary.").returns(Members(MIGRATION)),
    CommandSpec::new("query-colo-status", "Returns whether a guest is protected here.").returns(Members(COLO_STATUS)),
    CommandSpec::new("x-colo-lost-heartbeat", "Starts an unplanned takeover, which needs the claim and the fence."),
    CommandSpec::new("x-sterna-query-protection", "Returns the state and the statistics of the protection.").returns(Members(PROTECTION)),
    CommandSpec::new("x-sterna-takeover", "Starts a takeover, or repeats its failed step. Returns as soon as the \
                                           takeover has started.").takes(&[
        optional("planned", Boolean, "The primary takes a last checkpoint first, and stops its guest."),
        optional("vouch", Boolean, "The operator declares that the primary's guest does not run and never will."),
        optional("image", Boolean, "Writes an image instead of starting the guest in the waiting VM."),
        optional("without-arbiter", Boolean, "Last resort: the operator decides instead of an arbiter that never answers. Needs `vouch` and `image`."),
    ]),
    CommandSpec::new("x-sterna-migration-statistics", "Returns an empty object.").returns(MemberKind::Object),
    CommandSpec::new("quit", "Ends the standby, as Ctrl-C does."),
];

/// The operator's options for a takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Takeover {
    /// Whether the primary first takes a last checkpoint and stops its guest.
    pub is_planned: bool,
    /// Whether the operator guarantees that the primary's guest does not run, and never will.
    pub vouches: bool,
    /// Whether the guest is saved into an image, instead of running in the waiting VM.
    pub into_image: bool,
    /// Whether the operator decides in place of an arbiter that never answers. Only for emergencies. Needs
    /// [`Takeover::vouches`] and [`Takeover::into_image`].
    pub without_arbiter: bool,
}

/// The standby that a monitor controls.
pub trait StandbyControl: Send + Sync {
    /// The present state.
    fn report(&self) -> StandbyReport;
    /// Starts a takeover, or repeats the step that failed. Returns when the takeover is under way.
    ///
    /// # Errors
    /// The reason why no takeover starts, with advice.
    fn take_over(&self, wish: Takeover) -> Result<(), String>;
    /// Ends the standby, as Ctrl-C does.
    fn quit(&self);
}

/// Executes the commands of a monitor's clients.
pub struct StandbyMonitor(Arc<dyn StandbyControl>);

impl StandbyMonitor {
    /// The monitor of `standby`.
    pub fn new(standby: Arc<dyn StandbyControl>) -> Arc<Self> {
        Arc::new(Self(standby))
    }

    /// The answer to `query-colo-status` of a QEMU that is a secondary.
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
        COMMANDS.to_vec()
    }

    fn events(&self) -> Vec<EventSpec> {
        vec![COLO_EXIT]
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        let flag = |name: &str| arguments.get(name) == Some(&Value::Bool(true));
        match command {
            // A standby never runs a guest itself.
            "query-status" => Ok(json!({"status": "inmigrate", "running": false})),
            "query-migrate" => Ok(self.query_migrate()),
            "query-colo-status" => Ok(self.colo_status()),
            "x-colo-lost-heartbeat" => self.take_over(Takeover::default()),
            "x-sterna-takeover" => self.take_over(Takeover {
                is_planned: flag("planned"),
                vouches: flag("vouch"),
                into_image: flag("image"),
                without_arbiter: flag("without-arbiter"),
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
