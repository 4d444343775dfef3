//! The process guest's implementation of the traits that engine and monitor use.

use std::sync::Arc;

use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Throttle, VcpuDirtyRate, Vm, VmError};
use sterna_ram::{DirtySource, GuestRam};

use super::config::MOST_WORKERS;
use super::state::{Compatibility, GuestState};
use super::worker::Run;
use super::{Inner, Phase, ProcessGuest, no_guest};

/// The machine type in the stream's configuration section.
const MACHINE_TYPE: &str = "sterna-process";

impl Vm for ProcessGuest {
    fn machine_type(&self) -> String {
        MACHINE_TYPE.into()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.config.uuid
    }

    fn ram(&self) -> GuestRam {
        self.inner.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.all_devices()
    }

    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        Some(Arc::new(CompatibilityRecord(Arc::clone(&self.inner))))
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.all_hooks()
    }
}

impl SourceVm for ProcessGuest {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.inner.tracker.source()
    }

    fn may_hold_writes(&self) -> bool {
        true
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        Some(self)
    }

    fn run_state(&self) -> RunState {
        self.inner.run_state()
    }

    fn stop(&self) -> Result<(), VmError> {
        let mut phase = self.inner.phase();
        match std::mem::replace(&mut *phase, Phase::Ended) {
            Phase::Running(run) => {
                *phase = Phase::Stopped(run.stop()?);
                Ok(())
            }
            stopped @ Phase::Stopped(_) => {
                *phase = stopped;
                Ok(())
            }
            other => {
                *phase = other;
                Err(no_guest("stop"))
            }
        }
    }

    fn resume(&self) -> Result<(), VmError> {
        let mut phase = self.inner.phase();
        match std::mem::replace(&mut *phase, Phase::Ended) {
            Phase::Stopped(state) => self.inner.run(&mut phase, state, Phase::Stopped),
            running @ Phase::Running(_) => {
                *phase = running;
                Ok(())
            }
            other => {
                *phase = other;
                Err(no_guest("run on"))
            }
        }
    }
}

/// Each worker acts as a vCPU. Every step counts as a dirtied page, even if the page is dirty already.
///
/// The rates are therefore those of a dirty ring that is synced after each step.
impl Throttle for ProcessGuest {
    fn set_cpu_throttle(&self, percent: u8) {
        self.inner.live.set_throttle_percent(percent);
        self.wake_sleepers();
    }

    fn can_limit_dirty_rate(&self) -> bool {
        true
    }

    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        let refuse = |why: String| Err(VmError::new("set a worker's dirty limit", why));
        let workers = match &*self.inner.phase() {
            Phase::Running(run) => run.workers(),
            Phase::Stopped(state) | Phase::Loaded(state) => state.workers.len(),
            // Removing every limit is permitted without a guest.
            Phase::Waiting | Phase::Ended if vcpu.is_none() && bytes_per_second.is_none() => 0,
            Phase::Waiting | Phase::Ended => return Err(no_guest("set a worker's dirty limit")),
        };
        if bytes_per_second == Some(0) {
            return refuse("with a limit of 0 the guest would never go on: give bytes per second".into());
        }
        let which = match vcpu {
            None => 0..MOST_WORKERS,
            Some(worker) if worker < workers => worker..worker + 1,
            Some(worker) => return refuse(format!("there is no worker {worker}: the guest has {workers}")),
        };
        self.inner.live.set_dirty_limit(which, bytes_per_second);
        self.wake_sleepers();
        Ok(())
    }

    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        match &*self.inner.phase() {
            Phase::Running(run) => run.dirty_rates(&self.inner.live),
            Phase::Stopped(state) | Phase::Loaded(state) => {
                let limit = |worker| self.inner.live.throttle_limits(worker).dirty_bytes_per_second;
                let rate = |worker| VcpuDirtyRate { rate_bytes: 0, limit_bytes: limit(worker) };
                (0..state.workers.len()).map(rate).collect()
            }
            Phase::Waiting | Phase::Ended => Vec::new(),
        }
    }
}

impl TargetVm for ProcessGuest {
    fn start(&self) -> Result<(), VmError> {
        let mut phase = self.inner.phase();
        match std::mem::replace(&mut *phase, Phase::Ended) {
            Phase::Loaded(state) => self.inner.run(&mut phase, state, Phase::Loaded),
            other => {
                *phase = other;
                Err(VmError::new("start the guest", "no state was loaded"))
            }
        }
    }

    fn take_over_paused(&self) -> Result<(), VmError> {
        let mut phase = self.inner.phase();
        match std::mem::replace(&mut *phase, Phase::Ended) {
            Phase::Loaded(state) => {
                *phase = Phase::Stopped(state);
                Ok(())
            }
            other => {
                *phase = other;
                Err(VmError::new("take the guest over", "no state was loaded"))
            }
        }
    }

    fn reset(&self) {
        let mut phase = self.inner.phase();
        if let Phase::Loaded(_) = *phase {
            *phase = Phase::Waiting;
        }
    }
}

impl sterna_qmp::MonitoredVm for ProcessGuest {
    fn pause(&self) -> Result<(), VmError> {
        Self::pause(self)
    }
    fn cont(&self) -> Result<(), VmError> {
        Self::cont(self)
    }
    fn quit(&self) {
        Self::quit(self);
    }
    fn has_guest(&self) -> bool {
        Self::has_guest(self)
    }
    fn name(&self) -> String {
        self.config.name.clone()
    }
}

impl ProcessGuest {
    fn wake_sleepers(&self) {
        if let Phase::Running(run) = &*self.inner.phase() {
            run.wake_sleepers();
        }
    }

    fn all_devices(&self) -> Vec<Arc<dyn Device>> {
        let own: Arc<dyn Device> = Arc::new(GuestDevice(Arc::clone(&self.inner)));
        let extra = self.extra_devices.lock();
        std::iter::once(own).chain(extra.iter().cloned()).collect()
    }

    fn all_hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.hooks.lock().clone()
    }
}

impl Inner {
    /// Starts the threads with `state`. If that fails, `back` determines the phase that keeps the state.
    fn run(
        self: &Arc<Self>,
        phase: &mut Phase,
        state: GuestState,
        back: fn(GuestState) -> Phase,
    ) -> Result<(), VmError> {
        match Run::spawn(Arc::clone(self), state) {
            Ok(run) => {
                *phase = Phase::Running(run);
                Ok(())
            }
            Err((state, error)) => {
                *phase = back(state);
                Err(error)
            }
        }
    }
}

/// All state of the guest outside RAM, as a device.
struct GuestDevice(Arc<Inner>);

impl Device for GuestDevice {
    fn name(&self) -> String {
        "process-guest".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        match &*self.0.phase() {
            Phase::Stopped(state) => Ok(state.encode()),
            Phase::Running(_) => Err(VmError::new("save process-guest", "the guest runs")),
            Phase::Waiting | Phase::Loaded(_) | Phase::Ended => Err(no_guest("save process-guest")),
        }
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let mut phase = self.0.phase();
        if !matches!(*phase, Phase::Waiting | Phase::Loaded(_)) {
            return Err(VmError::new("load process-guest", "there is a guest here already, or it was ended"));
        }
        let state =
            GuestState::decode(body, &self.0.ram).map_err(|why| VmError::new("load process-guest", why))?;
        *phase = Phase::Loaded(state);
        Ok(())
    }
}

/// The record with which the destination checks that it can run the guest.
struct CompatibilityRecord(Arc<Inner>);

impl CompatibilityRecord {
    fn own(&self) -> Compatibility {
        Compatibility {
            level: self.0.level,
            pages: self.0.ram.blocks().iter().map(|block| block.pages()).sum(),
        }
    }
}

impl Device for CompatibilityRecord {
    fn name(&self) -> String {
        "process-guest-compatibility".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(self.own().encode())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let refuse = |why: String| VmError::new("compare with the source's machine", why);
        let (theirs, own) = (Compatibility::decode(body).map_err(refuse)?, self.own());
        if theirs.level > own.level {
            return Err(refuse(format!(
                "its level is {}, ours {}; choose a newer machine",
                theirs.level, own.level
            )));
        }
        if theirs.pages != own.pages {
            return Err(refuse(format!("it has {} pages of RAM, ours {}", theirs.pages, own.pages)));
        }
        Ok(())
    }
}
