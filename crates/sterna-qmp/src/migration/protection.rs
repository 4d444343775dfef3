//! A VM as a side of a protection: its guest is protected by a standby, or it is the standby of another's guest (`x-colo`).

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::replica::{Claims, EpochGate, PrimaryOptions, Protection as Name, Secret, StandbyOptions, Terms};

use super::engine::{GuestAt, Outgoing, Receiving};
use super::parameters::ParameterSet;
use super::vm::MonitoredVm;
use crate::error::QmpError;
use crate::server::{ArgumentKind, Arguments, CommandSpec, EventBus};

/// Which side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It runs the guest.
    Primary,
    /// It holds the guest's checkpoints.
    Standby,
}

/// The arbiter's claim of a protection, for a side.
pub type ClaimsOf = Arc<dyn Fn(Side, Name) -> Arc<dyn Claims> + Send + Sync>;
/// Decides the claim that waits: whether this side has won.
pub type Decide = Arc<dyn Fn(bool) -> Result<(), String> + Send + Sync>;
/// Says what a guest had said that nobody may have heard, and how many bytes it had said before.
pub type SayAgain = Arc<dyn Fn(u64, &[u8]) + Send + Sync>;

/// What a VM has for being a side of a protection.
#[derive(Clone)]
pub struct ProtectionMeans {
    /// What both sides know.
    pub secret: Secret,
    /// Whether a primary that shows no certificate is taken over TCP, on loopback.
    pub is_insecure: bool,
    /// The times, which the primary sets.
    pub terms: Terms,
    /// Who decides when the sides cannot reach each other.
    pub claims: ClaimsOf,
    /// Holds what the guest says.
    pub gate: Arc<dyn EpochGate>,
    /// For a guest that goes on here.
    pub say_again: SayAgain,
    /// Why the guest cannot be protected: devices whose output no gate holds, or whose content no checkpoint carries.
    pub unheld: Vec<String>,
    /// Where an operator is the arbiter: gives the claim that waits to this side, or to the other.
    pub decide: Option<Decide>,
}

/// How a protection ended at this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionEnd {
    /// The guest is here, and runs unprotected.
    Here {
        /// It was the operator's wish.
        is_wanted: bool,
    },
    /// The other side has it.
    There {
        /// It was handed over as planned.
        is_planned: bool,
    },
    /// Nothing was protected: the seeding failed.
    Failed,
}

/// A protection, as a monitor sees it.
pub trait Protection: Send + Sync {
    /// QEMU's word for this side, while the protection lasts.
    fn mode(&self) -> Option<&'static str>;
    /// All that is known.
    fn report(&self) -> Value;
    /// Ends it with the guest at the primary.
    ///
    /// # Errors
    /// Why it cannot be ended, or not here.
    fn unprotect(&self) -> Result<(), String>;
    /// The guest goes to the standby; `is_planned`: with a last checkpoint.
    ///
    /// # Errors
    /// Why it cannot.
    fn take_over(&self, is_planned: bool) -> Result<(), String>;
    /// The operator is the arbiter, and says who has the guest.
    ///
    /// # Errors
    /// Nothing waits for that.
    fn decide(&self, guest_at: GuestAt) -> Result<(), String>;
    /// Changes the interval between checkpoints.
    fn set_delay(&self, delay: Duration);
    /// Waits for the end.
    fn wait(&self) -> ProtectionEnd;
}

impl ParameterSet {
    /// How a guest is protected from here.
    pub(super) fn primary_options(&self, terms: Terms) -> PrimaryOptions {
        PrimaryOptions {
            checkpoint_delay: self.checkpoint_delay(),
            buffer_bytes: self.number(BUFFER_SIZE),
            terms,
        }
    }

    /// How a standby here holds checkpoints.
    pub(super) fn standby_options(&self, is_insecure: bool) -> StandbyOptions {
        StandbyOptions { journal_limit_bytes: self.number(JOURNAL_SIZE), insecure: is_insecure }
    }

    pub(super) fn checkpoint_delay(&self) -> Duration {
        Duration::from_millis(self.number("x-checkpoint-delay"))
    }
}

/// The most bytes of a checkpoint's pages that are copied while the guest stands.
pub(super) const BUFFER_SIZE: &str = "x-sterna-checkpoint-buffer-size";
/// The most bytes that a checkpoint may bring to a standby.
pub(super) const JOURNAL_SIZE: &str = "x-sterna-checkpoint-journal-size";

/// QEMU's commands of COLO, and this monitor's own.
pub(super) fn commands() -> [CommandSpec; 5] {
    [
        CommandSpec::new("query-colo-status"),
        CommandSpec::new("x-colo-lost-heartbeat"),
        CommandSpec::new("x-sterna-query-protection"),
        CommandSpec::new("x-sterna-unprotect"),
        CommandSpec::new("x-sterna-takeover").optional("planned", ArgumentKind::Boolean),
    ]
}

/// Executes one of [`commands`]; `last`: the newest protection, if there ever was one. `None`: it is another command.
pub(super) fn execute(
    command: &str,
    arguments: &Map<String, Value>,
    last: Option<&dyn Protection>,
) -> Option<Result<Value, QmpError>> {
    let mode = last.and_then(Protection::mode);
    let done = |result: Result<(), String>| result.map(|()| json!({})).map_err(QmpError::generic);
    let with = |act: &dyn Fn(&dyn Protection) -> Result<(), String>| match last.filter(|_| mode.is_some()) {
        Some(protection) => done(act(protection)),
        None => Err(QmpError::generic("VM is not in COLO mode: nothing is protected here")),
    };
    Some(match command {
        "query-colo-status" => Ok(status(mode, last)),
        // QEMU's primary goes on alone, its secondary runs the guest. Here both ask: nothing is forced.
        "x-colo-lost-heartbeat" if mode == Some("secondary") => {
            with(&|protection| protection.take_over(false))
        }
        "x-colo-lost-heartbeat" | "x-sterna-unprotect" => with(&|protection| protection.unprotect()),
        "x-sterna-takeover" => match Arguments(arguments).flag("planned") {
            Ok(is_planned) => with(&|protection| protection.take_over(is_planned)),
            Err(error) => Err(error),
        },
        "x-sterna-query-protection" => Ok(last.map_or_else(|| json!({}), Protection::report)),
        _ => return None,
    })
}

fn status(mode: Option<&'static str>, last: Option<&dyn Protection>) -> Value {
    let before = match (mode, last) {
        (None, Some(last)) => last.report()["side"].as_str().map(str::to_owned),
        _ => None,
    };
    let reason = if before.is_some() { "request" } else { "none" };
    json!({"mode": mode.unwrap_or("none"), "last-mode": before.unwrap_or_else(|| "none".to_owned()), "reason": reason})
}

/// Passes an operator's decision on.
pub(super) fn decide(decide: Option<&Decide>, has_won: bool) -> Result<(), String> {
    match decide {
        Some(decide) => decide(has_won),
        None => Err("this VM's arbiter decides who runs the guest, not an operator".to_owned()),
    }
}

/// Tells clients how a protection ends at its primary. A guest that the standby has makes this VM useless.
pub(super) fn watch_primary(outgoing: Arc<dyn Outgoing>, vm: Arc<dyn MonitoredVm>, bus: EventBus) {
    let watch = move || {
        let Some(end) = outgoing.protection().map(Protection::wait) else { return };
        let reason = match end {
            ProtectionEnd::Failed => return,
            ProtectionEnd::Here { is_wanted: true } | ProtectionEnd::There { is_planned: true } => "request",
            _ => "error",
        };
        bus.emit("COLO_EXIT", Some(json!({"mode": "primary", "reason": reason})));
        if let ProtectionEnd::There { is_planned: false } = end {
            vm.guest_is_lost();
        }
    };
    spawn(watch);
}

/// Tells clients how a protection ends at its standby.
pub(super) fn watch_standby(standby: Arc<dyn Receiving>, bus: EventBus) {
    let watch = move || {
        let Some(end) = standby.protection().map(Protection::wait) else { return };
        match end {
            ProtectionEnd::Failed => {}
            ProtectionEnd::Here { .. } => {
                bus.emit("COLO_EXIT", Some(json!({"mode": "secondary", "reason": "request"})));
                bus.emit("RESUME", None);
            }
            ProtectionEnd::There { .. } => {
                bus.emit("COLO_EXIT", Some(json!({"mode": "secondary", "reason": "error"})));
            }
        }
    };
    spawn(watch);
}

fn spawn(watch: impl FnOnce() + Send + 'static) {
    // Without the thread clients hear nothing by themselves; 'query-colo-status' still says what happened.
    let _ = std::thread::Builder::new().name("qmp-protection".into()).spawn(watch);
}
