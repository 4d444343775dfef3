//! The engine's view of the machine: [`sterna::SourceVm`] and [`sterna::TargetVm`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna::{
    Device, DirtyLimitTimes, FreePageHints, Hook, HostDescriptors, RunState, SourceVm, TargetVm, Throttle,
    VcpuDirtyRate, Vm, VmError,
};
use sterna_ram::{DirtySource, GuestRam};

use super::{KvmMachine, MACHINE_TYPE};

impl Vm for KvmMachine {
    fn machine_type(&self) -> String {
        MACHINE_TYPE.into()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }

    fn ram(&self) -> GuestRam {
        KvmMachine::ram(self).clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        KvmMachine::devices(self)
    }

    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        Some(KvmMachine::compatibility(self))
    }

    fn shares_ram_with(&self) -> Option<String> {
        self.hardware.external.name()
    }

    fn cannot_follow(&self) -> Option<String> {
        self.hardware.external.cannot_follow(self.has_guest())
    }

    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        let taps = self.hardware.virtio.taps().iter().cloned();
        let processes = self.hardware.external.vhost_user.iter();
        taps.chain(processes.map(|device| Arc::clone(device) as Arc<dyn HostDescriptors>)).collect()
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        let mut hooks = vec![self.devices.complete()];
        hooks.extend_from_slice(self.hardware.virtio.hooks());
        hooks
    }
}

impl SourceVm for KvmMachine {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.tracking.source()
    }

    fn may_hold_writes(&self) -> bool {
        let external = &self.hardware.external;
        external.vfio_user.is_empty() && external.vhost_user.is_empty()
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        Some(self)
    }

    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        self.hardware.virtio.free_page_hints()
    }

    fn run_state(&self) -> RunState {
        if self.is_running() { RunState::Running } else { RunState::Paused }
    }

    fn stop(&self) -> Result<(), VmError> {
        KvmMachine::stop(self);
        Ok(())
    }

    /// Does not resume devices with a stream. The engine resumes those itself before it calls this.
    fn resume(&self) -> Result<(), VmError> {
        Ok(self.let_run(false)?)
    }
}

impl Throttle for KvmMachine {
    fn set_cpu_throttle(&self, percent: u8) {
        self.throttling.set_cpu_throttle(percent);
    }

    fn can_limit_dirty_rate(&self) -> bool {
        self.tracking.ring().is_some()
    }

    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        self.throttling.set_dirty_limit(vcpu, bytes_per_second)
    }

    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        self.throttling.vcpu_dirty_rates()
    }

    fn dirty_limit_times(&self) -> Option<DirtyLimitTimes> {
        self.throttling.dirty_limit_times()
    }
}

impl TargetVm for KvmMachine {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.check_loaded()
    }

    fn start(&self) -> Result<(), VmError> {
        let _one = self.operation();
        TargetVm::take_over_paused(self)?;
        self.run();
        Ok(())
    }

    fn take_over_paused(&self) -> Result<(), VmError> {
        self.check_loaded()?;
        self.hardware.external.introduce(&self.name);
        self.has_guest.store(true, Ordering::Release);
        Ok(())
    }

    fn threads_of_vcpus(&self) -> Vec<u32> {
        self.vcpu_threads().into_iter().filter_map(|thread| u32::try_from(thread).ok()).collect()
    }

    fn reset(&self) {
        if let Some(pristine) = &self.pristine {
            self.devices.reset(pristine);
        }
    }
}

impl KvmMachine {
    fn check_loaded(&self) -> Result<(), VmError> {
        match self.devices.missing() {
            Some(section) => {
                Err(VmError::new("accepting the guest", format!("section {section} did not arrive")))
            }
            None => Ok(()),
        }
    }
}
