//! The socket of a protection: its state, its end, and an operator's decision, over QMP.
//!
//! | command | does |
//! | --- | --- |
//! | `query-colo-status` | as QEMU's: whether this is the primary side of a protection that goes on |
//! | `x-sterna-query-protection` | all that `sterna protect --json` prints in a line |
//! | `x-sterna-unprotect` | ends the protection with the guest here; answers when QEMU is as it was |
//! | `x-sterna-takeover` | hands the guest over to the standby as planned; answers when it is there |
//! | `x-sterna-decide` | with the arbiter `ask`: `source` says that this side runs the guest, `destination` that the standby does |

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::{Map, Value, json};
use sterna_arbiter::Operator;
use sterna_qmp::drive::protect::{ProtectionEnd, QemuProtection};
use sterna_qmp::server::{ArgumentKind, CommandSpec, Context};
use sterna_qmp::{Endpoint, EventBus, Handler, QmpError, Server};

use super::show;
use crate::exit::Stop;

/// How long a command waits for the end of the protection.
const END_LIMIT: Duration = Duration::from_secs(100);

/// Handles the commands.
pub(super) struct Control {
    session: Arc<QemuProtection>,
    operator: Option<Operator>,
    /// How it ended, when QEMU was seen to.
    end: Mutex<Option<Result<ProtectionEnd, String>>>,
    changed: Condvar,
}

impl Control {
    pub(super) fn new(session: Arc<QemuProtection>, operator: Option<Operator>) -> Self {
        Self { session, operator, end: Mutex::default(), changed: Condvar::new() }
    }

    /// Listens.
    pub(super) fn listen(self: &Arc<Self>, endpoint: &Endpoint) -> Result<Server, Stop> {
        Server::bind(endpoint, Arc::clone(self) as Arc<dyn Handler>, EventBus::new())
            .map_err(|error| Stop::failed(format!("--qmp: {error}")))
    }

    /// It has ended, and so have the commands that wait for that.
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
            Some(Ok(end)) => Ok(show::end_value(end, &self.session)),
            Some(Err(why)) => Err(QmpError::generic(why)),
            None => Err(QmpError::generic(
                "the protection has not ended yet: the standby has not said its last word; see x-sterna-query-protection",
            )),
        }
    }

    /// Whether it has ended with the guest here.
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
                "this protection's arbiter decides: no operator does (only --arbiter ask leaves it to one)",
            )
        })?;
        operator.decide(won).map_err(|error| QmpError::generic(error.to_string()))?;
        Ok(json!({}))
    }
}

impl Handler for Control {
    fn commands(&self) -> Vec<CommandSpec> {
        let mut commands = vec![CommandSpec::new("x-sterna-decide").required("guest", ArgumentKind::String)];
        let plain =
            ["query-colo-status", "x-sterna-query-protection", "x-sterna-unprotect", "x-sterna-takeover"];
        commands.extend(plain.map(CommandSpec::new));
        commands
    }

    fn events(&self) -> Vec<&'static str> {
        Vec::new()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        _: &mut Context,
    ) -> Result<Value, QmpError> {
        let refused =
            |refusal: sterna::replica::machines::primary::Refusal| QmpError::generic(refusal.to_string());
        match command {
            "query-colo-status" => Ok(match self.session.outcome() {
                None => json!({"mode": "primary", "last-mode": "none", "reason": "none"}),
                Some(_) => json!({"mode": "none", "last-mode": "primary", "reason": "request"}),
            }),
            "x-sterna-query-protection" => Ok(show::value(&self.session.statistics(), 0.0)),
            "x-sterna-unprotect" => {
                self.session.unprotect().map_err(refused)?;
                self.wait()
            }
            "x-sterna-takeover" => {
                self.session.hand_over().map_err(refused)?;
                let end = self.wait()?;
                if self.runs_here() {
                    return Err(QmpError::generic(
                        "the standby has not taken the guest over: it runs on here, unprotected; see the standby's log, and protect it anew",
                    ));
                }
                Ok(end)
            }
            "x-sterna-decide" => self.decide(arguments),
            other => Err(QmpError::command_not_found(format!("The command {other} has not been found"))),
        }
    }
}
