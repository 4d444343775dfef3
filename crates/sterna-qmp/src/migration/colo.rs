//! COLO on the monitor: QEMU's commands, and this monitor's own, of a VM that is a side of a protection.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::replica::{
    CheckpointCopy, CheckpointMode, MOST_IN_FLIGHT, PrimaryOptions, StandbyOptions, Terms,
};

use super::engine::{Outgoing, Receiving};
use super::parameters::{
    BUFFER_SIZE, CHECKPOINT_COPY, CHECKPOINT_MODE, CHECKPOINT_OVERHEAD, IN_FLIGHT, JOURNAL_SIZE,
    OUTPUT_DELAY, ParameterSet,
};
use super::protection::{Decide, Protection, ProtectionEnd};
use super::vm::MonitoredVm;
use crate::error::QmpError;
use crate::server::{ArgumentKind, Arguments, CommandSpec, EventBus};

impl ParameterSet {
    /// How a guest is protected from here.
    pub(super) fn primary_options(&self, terms: Terms) -> PrimaryOptions {
        PrimaryOptions {
            checkpoint_delay: self.checkpoint_delay(),
            checkpoint_mode: self.checkpoint_mode(),
            checkpoints_in_flight: self.checkpoints_in_flight(),
            buffer_bytes: self.number(BUFFER_SIZE),
            checkpoint_copy: self.checkpoint_copy(),
            terms,
        }
    }

    /// How a standby here holds checkpoints.
    pub(super) fn standby_options(&self, is_insecure: bool) -> StandbyOptions {
        StandbyOptions {
            journal_limit_bytes: self.number(JOURNAL_SIZE),
            insecure: is_insecure,
            ..StandbyOptions::default()
        }
    }

    pub(super) fn checkpoint_delay(&self) -> Duration {
        Duration::from_millis(self.number("x-checkpoint-delay"))
    }

    pub(super) fn checkpoints_in_flight(&self) -> u8 {
        // The table takes no other.
        self.number(IN_FLIGHT).clamp(1, MOST_IN_FLIGHT.into()) as u8
    }

    pub(super) fn checkpoint_copy(&self) -> CheckpointCopy {
        match self.word(CHECKPOINT_COPY) {
            "copy" => CheckpointCopy::Copy,
            "copy-on-write" => CheckpointCopy::CopyOnWrite,
            _ => CheckpointCopy::Auto,
        }
    }

    pub(super) fn checkpoint_mode(&self) -> CheckpointMode {
        match self.word(CHECKPOINT_MODE) {
            "output" => CheckpointMode::Output(Duration::from_millis(self.number(OUTPUT_DELAY))),
            "load" => CheckpointMode::Load(u8::try_from(self.number(CHECKPOINT_OVERHEAD)).unwrap_or(u8::MAX)),
            _ => CheckpointMode::Interval,
        }
    }
}

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
