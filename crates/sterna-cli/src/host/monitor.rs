//! The monitor of a hosted VM: the migration commands, and four commands of Sterna for the guest.
//!
//! [`GUEST_COMMANDS`] lists them.
//!
//! Three of them are for guests of `guests/`, which write their memory by rules. With another guest,
//! they fail.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna::{RunState, SourceVm};
use sterna_qmp::server::MemberKind::{self, Boolean, Integer, Members, Object};
use sterna_qmp::server::{CommandSpec, Context, EventSpec, MemberSpec};
use sterna_qmp::{Handler, MigrationControl, QmpError};

use super::hosted::Hosted;
use super::restored::{QUERY_RESTORE, Restored};

/// Commands that would wait without end for a page that cannot be loaded.
const NEED_MEMORY: [&str; 5] =
    ["cont", "migrate", "x-sterna-live-save", "x-sterna-check-guest", "x-sterna-query-guest"];

/// The commands about the guest inside. All but the last are for guests that write their memory by rules.
#[rustfmt::skip]
pub const GUEST_COMMANDS: &[CommandSpec] = &[
    CommandSpec::new("x-sterna-check-guest", "Pauses the guest briefly and checks that the content of its RAM is \
                                              consistent.").returns(Members(&[
        MemberSpec::required("consistent", Boolean, "Whether the content is consistent."),
        MemberSpec::required("pages", Integer, "Pages that were checked."),
        MemberSpec::required("summary", MemberKind::String, "The result as text."),
        MemberSpec::required("guest", Object, "As `x-sterna-query-guest`."),
    ])),
    CommandSpec::new("x-sterna-query-guest", "Returns the guest's progress and rate, and the longest gap between two \
                                              of its heartbeats.").returns(Object),
    CommandSpec::new("x-sterna-set-guest", "Changes the guest's rate of writing.").takes(&[
        MemberSpec::optional("rate", Integer, "Pages per second that the guest writes."),
        MemberSpec::optional("reset-gap", Boolean, "Resets the longest gap."),
    ]),
    QUERY_RESTORE,
];

/// Handles all of it.
pub struct GuestMonitor {
    control: Arc<MigrationControl>,
    vm: Arc<Hosted>,
    restored: Arc<Restored>,
}

impl GuestMonitor {
    /// The monitor of `vm`, whose migrations `control` runs.
    pub fn new(control: Arc<MigrationControl>, vm: Arc<Hosted>, restored: Arc<Restored>) -> Arc<Self> {
        Arc::new(Self { control, vm, restored })
    }

    fn check(&self) -> Result<Value, QmpError> {
        let guest = self.vm.guest().map_err(refused)?;
        // The operator's commands are used, because they refuse to act while a switchover has the guest.
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
        commands.extend(GUEST_COMMANDS);
        commands
    }

    fn events(&self) -> Vec<EventSpec> {
        self.control.events()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        if let Some(why) = self.restored.failure().filter(|_| NEED_MEMORY.contains(&command)) {
            return Err(refused(why.to_owned()));
        }
        match command {
            // The stop may wait for a thread that waits for the page. It does not run any more.
            "query-status" if self.restored.failure().is_some() => {
                Ok(json!({"running": false, "status": "paused"}))
            }
            "x-sterna-query-restore" => Ok(self.restored.query()),
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
