//! The monitor of `sterna protect --qmp`: its commands query, end and decide a protection.
//!
//! [`COMMANDS`] lists what it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::{Map, Value, json};
use sterna_arbiter::Operator;
use sterna_drive::protect::{ProtectionEnd, QemuProtection};
use sterna_qmp::server::{CommandSpec, Context, EventSpec, MemberKind, MemberSpec};
use sterna_qmp::{Endpoint, EventBus, Handler, QmpError, Server};

use super::json::{End, Line};
use crate::exit::Stop;

/// How long a command waits for the end of the protection.
const END_LIMIT: Duration = Duration::from_secs(100);

/// Every command of the socket of `sterna protect`.
#[rustfmt::skip]
pub const COMMANDS: &[CommandSpec] = &[
    CommandSpec::new("x-sterna-decide", "With the arbiter `ask`: decides which side runs the guest.").takes(&[
        MemberSpec::required("guest", MemberKind::String, "`source`: this side. `destination`: the standby."),
    ]),
    CommandSpec::new("query-colo-status", "Returns whether this is the primary side of a running protection.").returns(MemberKind::Object),
    CommandSpec::new("x-sterna-query-protection", "Returns the content of one line of `sterna protect --json`.").returns(MemberKind::Object),
    CommandSpec::new("x-sterna-unprotect", "Ends the protection, with the guest here. Returns when QEMU's settings \
                                            are restored.").returns(MemberKind::Object),
    CommandSpec::new("x-sterna-takeover", "Performs a planned takeover: hands the guest over to the standby. Returns \
                                           when the standby has the guest.").returns(MemberKind::Object),
];

/// Handles the commands.
pub(super) struct Control {
    session: Arc<QemuProtection>,
    operator: Option<Operator>,
    /// Checkpoints per second, as in the last line of output.
    per_second: Mutex<Option<f64>>,
    /// How the protection ended, set after QEMU was restored.
    end: Mutex<Option<Result<ProtectionEnd, String>>>,
    changed: Condvar,
}

impl Control {
    pub(super) fn new(session: Arc<QemuProtection>, operator: Option<Operator>) -> Self {
        Self {
            session,
            operator,
            per_second: Mutex::default(),
            end: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Opens the monitor at `endpoint`.
    pub(super) fn listen(self: &Arc<Self>, endpoint: &Endpoint) -> Result<Server, Stop> {
        Server::bind(endpoint, Arc::clone(self) as Arc<dyn Handler>, EventBus::new())
            .map_err(|error| Stop::failed(format!("--qmp: {error}")))
    }

    /// Stores the checkpoint rate for queries.
    pub(super) fn measured(&self, per_second: Option<f64>) {
        *self.per_second.lock() = per_second;
    }

    /// Stores the end of the protection and wakes the commands that wait for it.
    pub(super) fn ended(&self, end: &Result<ProtectionEnd, Stop>) {
        *self.end.lock() = Some(end.clone().map_err(|stop| stop.message));
        self.changed.notify_all();
    }

    fn wait(&self) -> Result<Value, QmpError> {
        let until = Instant::now() + END_LIMIT;
        let mut end = self.end.lock();
        while end.is_none() {
            if self.changed.wait_until(&mut end, until).timed_out() {
                break;
            }
        }
        match &*end {
            Some(Ok(end)) => Ok(End::of_qemu(end, &self.session.statistics()).value()),
            Some(Err(why)) => Err(QmpError::generic(why)),
            None => Err(QmpError::generic(
                "the protection has not ended yet, because the standby has not confirmed the end; \
                 x-sterna-query-protection shows the state",
            )),
        }
    }

    /// Whether the protection has ended with the guest here.
    fn runs_here(&self) -> bool {
        matches!(&*self.end.lock(), Some(Ok(end)) if end.runs_here)
    }

    fn decide(&self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        let won = match arguments.get("guest").and_then(Value::as_str) {
            Some("source") => true,
            Some("destination") => false,
            _ => return Err(QmpError::expects("guest", "source or destination")),
        };
        let operator = self.operator.as_ref().ok_or_else(|| {
            QmpError::generic(
                "an operator cannot decide, because this protection has another arbiter (only --arbiter ask leaves \
                 the decision to an operator)",
            )
        })?;
        operator.decide(won).map_err(|error| QmpError::generic(error.to_string()))?;
        Ok(json!({}))
    }
}

impl Handler for Control {
    fn commands(&self) -> Vec<CommandSpec> {
        COMMANDS.to_vec()
    }

    fn events(&self) -> Vec<EventSpec> {
        Vec::new()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        _: &mut Context,
    ) -> Result<Value, QmpError> {
        let refused =
            |refusal: sterna_standby::machines::primary::Refusal| QmpError::generic(refusal.to_string());
        match command {
            "query-colo-status" => Ok(match self.session.outcome() {
                None => json!({"mode": "primary", "last-mode": "none", "reason": "none"}),
                Some(_) => json!({"mode": "none", "last-mode": "primary", "reason": "request"}),
            }),
            "x-sterna-query-protection" => {
                Ok(Line::of_qemu(&self.session.statistics(), *self.per_second.lock()).value())
            }
            "x-sterna-unprotect" => {
                self.session.unprotect().map_err(refused)?;
                self.wait()
            }
            "x-sterna-takeover" => {
                self.session.hand_over().map_err(refused)?;
                let end = self.wait()?;
                if self.runs_here() {
                    return Err(QmpError::generic(
                        "the standby has not taken over: the guest continues to run here, unprotected. See the \
                         standby's log, and protect the guest again",
                    ));
                }
                Ok(end)
            }
            "x-sterna-decide" => self.decide(arguments),
            other => Err(QmpError::command_not_found(format!("The command {other} has not been found"))),
        }
    }
}
