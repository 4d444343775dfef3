//! The program's machine, as the engine sees it.

use std::sync::Arc;

use sterna::ram::dirty::Combined;
use sterna::ram::{DirtySource, GuestRam};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Throttle, Vm, VmError};

use crate::callbacks::{User, inside, notify, run, sterna_state, sterna_step};
use crate::parts::{Parts, VmCallbacks};
use crate::tracking;

/// A machine whose parts are fixed.
pub(crate) struct Machine {
    pub(crate) ram: GuestRam,
    /// Whether there is a source of dirty pages.
    pub(crate) is_tracked: bool,
    parts: Parts,
    dirty: Combined,
}

impl Machine {
    /// # Errors
    /// Blocks or slots do not fit together.
    pub(crate) fn new(mut parts: Parts) -> Result<Self, String> {
        let ram = GuestRam::new(std::mem::take(&mut parts.blocks)).map_err(|error| error.to_string())?;
        let is_tracked = !parts.dirty.is_empty();
        let dirty =
            tracking::join(std::mem::take(&mut parts.dirty), &ram).map_err(|error| error.to_string())?;
        Ok(Self { ram, is_tracked, parts, dirty })
    }

    fn vm(&self) -> &VmCallbacks {
        &self.parts.vm
    }

    fn user(&self) -> User {
        User(self.vm().given.user)
    }

    fn step(&self, what: &str, step: sterna_step) -> Result<(), VmError> {
        // SAFETY: the program gave the callback for this pointer, which `parts.vm` keeps from being destroyed.
        unsafe { run(what, step, self.user()) }
    }
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        self.parts.machine_type.clone()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.parts.uuid
    }

    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.parts.devices.clone()
    }

    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.parts.compatibility.clone()
    }

    fn shares_ram_with(&self) -> Option<String> {
        self.parts.shares_ram_with.clone()
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.parts.hooks.clone()
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }

    fn run_state(&self) -> RunState {
        let user = self.user();
        let ask = |is_running: unsafe extern "C" fn(_) -> bool| {
            // SAFETY: as in `step`.
            inside(|| unsafe { is_running(user.0) })
        };
        if self.vm().given.is_running.is_some_and(ask) { RunState::Running } else { RunState::Paused }
    }

    fn stop(&self) -> Result<(), VmError> {
        self.step("stop the guest", self.vm().given.stop)
    }

    fn quiesce(&self) -> Result<(), VmError> {
        self.step("let devices write for the last time", self.vm().given.quiesce)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.step("resume the guest", self.vm().given.resume)
    }

    fn configuration(&self) -> Option<Vec<u8>> {
        let write = self.vm().given.configuration?;
        let mut state = sterna_state(Vec::new());
        // SAFETY: as in `step`.
        let is_written = inside(|| unsafe { write(self.user().0, &raw mut state) });
        is_written.then_some(state.0)
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        self.vm().given.set_cpu_throttle.map(|_| self as &dyn Throttle)
    }
}

impl Throttle for Machine {
    fn set_cpu_throttle(&self, percent: u8) {
        if let Some(set) = self.vm().given.set_cpu_throttle {
            // SAFETY: as in `step`.
            inside(|| unsafe { set(self.user().0, percent) });
        }
    }
}

impl TargetVm for Machine {
    fn may_hold_bytes(&self, block: usize) -> bool {
        self.parts.keeps_bytes.get(block).copied().unwrap_or(false)
    }

    fn prepare_start(&self) -> Result<(), VmError> {
        self.step("prepare the start of the guest", self.vm().given.prepare_start)
    }

    fn start(&self) -> Result<(), VmError> {
        self.step("start the guest", self.vm().given.start)
    }

    fn take_over_paused(&self) -> Result<(), VmError> {
        self.step("take over the paused guest", self.vm().given.take_over_paused)
    }

    fn reset(&self) {
        // SAFETY: as in `step`.
        unsafe { notify(self.vm().given.reset, self.user()) }
    }
}
