//! COLO on the monitor: QEMU's and Sterna's commands for a VM that is a side of a protection.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna_standby::{CheckpointMode, PrimaryOptions, StandbyOptions, Terms};

use super::engine::{Outgoing, Receiving};
use super::events::{COLO_EXIT, RESUME};
use super::parameters::{Checkpoints, Mode};
use super::protection::{Decide, Protection, ProtectionEnd};
use super::vm::MonitoredVm;
use crate::error::QmpError;
use crate::server::{Arguments, EventBus};

impl Checkpoints {
    /// The options of a protection by which this VM is the primary.
    pub(super) fn primary_options(&self, terms: Terms) -> PrimaryOptions {
        PrimaryOptions {
            checkpoint_delay: self.delay,
            checkpoint_mode: self.mode(),
            checkpoints_in_flight: self.in_flight,
            buffer_bytes: self.buffer_bytes,
            checkpoint_copy: self.copy,
            terms,
        }
    }

    /// The options of a protection by which this VM is the standby.
    pub(super) fn standby_options(&self, is_insecure: bool) -> StandbyOptions {
        StandbyOptions {
            journal_limit_bytes: self.journal_bytes,
            insecure: is_insecure,
            ..StandbyOptions::default()
        }
    }

    /// The mode, with its output delay if it has one.
    pub(super) fn mode(&self) -> CheckpointMode {
        match self.mode {
            Mode::Interval => CheckpointMode::Interval,
            Mode::Output => CheckpointMode::Output(self.output_delay),
            Mode::Load => CheckpointMode::Load(self.overhead_percent),
        }
    }
}

/// Executes a command of COLO. `last`: the newest protection, if there was one. `None`: it is another command.
pub(super) fn execute(
    command: &str,
    arguments: &Map<String, Value>,
    last: Option<&dyn Protection>,
) -> Option<Result<Value, QmpError>> {
    let mode = last.and_then(Protection::mode);
    let done = |result: Result<(), String>| result.map(|()| json!({})).map_err(QmpError::generic);
    let with = |act: &dyn Fn(&dyn Protection) -> Result<(), String>| match last.filter(|_| mode.is_some()) {
        Some(protection) => done(act(protection)),
        None => Err(QmpError::generic("VM is not in COLO mode: this VM has no protection")),
    };
    Some(match command {
        "query-colo-status" => Ok(status(mode, last)),
        // In QEMU, the primary continues alone and the secondary runs the guest. Here both ask first: nothing is
        // forced.
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

/// Passes an operator's decision to the arbiter's function.
pub(super) fn decide(decide: Option<&Decide>, has_won: bool) -> Result<(), String> {
    match decide {
        Some(decide) => decide(has_won),
        None => Err("this VM's arbiter decides who runs the guest, not an operator".to_owned()),
    }
}

/// Informs clients of the end of a protection at its primary. If the standby has the guest, this VM is useless.
pub(super) fn watch_primary(outgoing: Arc<dyn Outgoing>, vm: Arc<dyn MonitoredVm>, bus: EventBus) {
    let watch = move || {
        let Some(end) = outgoing.protection().map(Protection::wait) else { return };
        let reason = match end {
            ProtectionEnd::Failed => return,
            ProtectionEnd::Here { is_wanted: true } | ProtectionEnd::There { is_planned: true } => "request",
            _ => "error",
        };
        bus.emit(&COLO_EXIT, Some(json!({"mode": "primary", "reason": reason})));
        if let ProtectionEnd::There { is_planned: false } = end {
            vm.guest_is_lost();
        }
    };
    spawn(watch);
}

/// Informs clients of the end of a protection at its standby.
pub(super) fn watch_standby(standby: Arc<dyn Receiving>, bus: EventBus) {
    let watch = move || {
        let Some(end) = standby.protection().map(Protection::wait) else { return };
        match end {
            ProtectionEnd::Failed => {}
            ProtectionEnd::Here { .. } => {
                bus.emit(&COLO_EXIT, Some(json!({"mode": "secondary", "reason": "request"})));
                bus.emit(&RESUME, None);
            }
            ProtectionEnd::There { .. } => {
                bus.emit(&COLO_EXIT, Some(json!({"mode": "secondary", "reason": "error"})));
            }
        }
    };
    spawn(watch);
}

fn spawn(watch: impl FnOnce() + Send + 'static) {
    // Without the thread, clients get no event. 'query-colo-status' still shows the result.
    let _ = std::thread::Builder::new().name("qmp-protection".into()).spawn(watch);
}
