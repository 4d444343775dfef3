//! The machine as the engine sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna::{
    Device, DirtyLimitTimes, Hook, RunState, SourceVm, TargetVm, Throttle, VcpuDirtyRate, Vm, VmError,
};
use sterna_ram::{DirtySource, GuestRam};

use super::gate::Wanted;
use super::{KvmMachine, MACHINE_TYPE};
use crate::devices::{self, Complete};

impl Vm for KvmMachine {
    fn machine_type(&self) -> String {
        MACHINE_TYPE.into()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }

    fn ram(&self) -> GuestRam {
        self.shared.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.clone()
    }

    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        Some(Arc::clone(&self.compatibility))
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        vec![Arc::new(Complete(Arc::clone(&self.shared)))]
    }
}

impl SourceVm for KvmMachine {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.shared.tracking.source()
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        Some(self)
    }

    fn run_state(&self) -> RunState {
        if self.is_running() { RunState::Running } else { RunState::Paused }
    }

    fn stop(&self) -> Result<(), VmError> {
        KvmMachine::stop(self);
        Ok(())
    }

    /// The engine runs devices with a stream itself, before it calls this.
    fn resume(&self) -> Result<(), VmError> {
        Ok(self.let_run(false)?)
    }
}

impl Throttle for KvmMachine {
    fn set_cpu_throttle(&self, percent: u8) {
        self.shared.set_cpu_throttle(percent);
    }

    fn can_limit_dirty_rate(&self) -> bool {
        self.shared.tracking.ring().is_some()
    }

    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        self.shared.set_dirty_limit(vcpu, bytes_per_second)
    }

    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        self.shared.vcpu_dirty_rates()
    }

    fn dirty_limit_times(&self) -> Option<DirtyLimitTimes> {
        self.shared.dirty_limit_times()
    }
}

impl TargetVm for KvmMachine {
    fn start(&self) -> Result<(), VmError> {
        TargetVm::take_over_paused(self)?;
        self.shared.tell_paused();
        self.shared.gate.want(Wanted::Run, || {});
        Ok(())
    }

    fn take_over_paused(&self) -> Result<(), VmError> {
        if let Some(section) = self.shared.loading().missing(&self.devices) {
            return Err(VmError::new("taking the guest over", format!("section {section} did not come")));
        }
        self.has_guest.store(true, Ordering::Release);
        Ok(())
    }

    fn reset(&self) {
        let Some(pristine) = &self.pristine else { return };
        *self.shared.loading() = devices::Loading::default();
        for (device, body) in self.devices.iter().zip(pristine) {
            if let Err(error) = device.load(device.version(), body) {
                // The next load replaces every bit of it, and no guest starts without one.
                tracing::error!(%error, "a device could not be reset");
            }
        }
        *self.shared.loading() = devices::Loading::default();
    }
}
