//! Decides whether a restored guest starts.

use serde_json::Value;

use super::Start;
use crate::{DriveError, Vm};

/// Decides whether the guest should run. None leaves the decision to the VM. `was_running`: whether the guest ran when
/// it was saved; None if only the VM will know. A VM that was started with `-S` keeps its guest paused.
/// Sentences for the operator are added to `warnings`.
pub(super) fn decide(
    vm: &mut Vm,
    start: Start,
    was_running: Option<bool>,
    warnings: &mut Vec<String>,
) -> Option<bool> {
    match (start, was_running) {
        (Start::Paused, _) => Some(false),
        (Start::Running, _) => Some(true),
        (Start::AsItWas, Some(true)) if !vm.is_sterna() => match vm.was_started_stopped() {
            Some(false) => Some(true),
            Some(true) => {
                warnings.push(format!(
                    "{} was started with -S, so its guest stays paused: `cont` starts it",
                    vm.at()
                ));
                Some(false)
            }
            None => {
                warnings.push(format!(
                    "it is unknown whether {} was started with -S, so its guest is started; --paused leaves it paused",
                    vm.at()
                ));
                Some(true)
            }
        },
        (Start::AsItWas, was_running) => was_running,
    }
}

/// A waiting VM that may not start its guest by itself.
pub(super) struct Held {
    /// The VM was started with `-S`, so it would not have started the guest anyway.
    was_stopped: bool,
}

impl Held {
    /// Sends `stop` to `vm`.
    pub(super) fn new(vm: &mut Vm) -> Result<Self, DriveError> {
        let was_stopped = vm.was_started_stopped() == Some(true);
        // While the VM waits, `stop` only means that the guest must not start by itself.
        vm.execute("stop", Value::Null)?;
        Ok(Self { was_stopped })
    }

    /// Undoes the `stop` if nothing was loaded: the VM waits as before.
    pub(super) fn release(self, vm: &mut Vm) {
        if !self.was_stopped {
            // While the VM waits, `cont` only undoes the `stop`. If the VM has ended, nothing must be undone.
            let _ = vm.execute("cont", Value::Null);
        }
    }
}
