//! The vCPUs of a machine. They run in the guest or are parked at the gate.

pub(crate) mod gate;
pub(crate) mod thread;
pub(crate) mod throttle;
pub(crate) mod tracking;
pub(crate) mod vcpu;

use std::sync::Arc;
use std::time::Duration;

use kvm_ioctls::VcpuFd;
use parking_lot::MutexGuard;

use crate::end_reason::EndReason;
use crate::hardware::vm::KvmVm;
use gate::{Gate, Wanted};
use vcpu::Vcpu;

/// All vCPUs of a machine, and the gate at which their threads wait.
pub(crate) struct Vcpus {
    gate: Gate,
    vcpus: Vec<Vcpu>,
}

impl Vcpus {
    /// Takes the vCPUs' descriptors of `vm`. All vCPUs are parked; [`thread::spawn`] starts their threads.
    pub(crate) fn new(fds: Vec<VcpuFd>, vm: &Arc<KvmVm>) -> Self {
        let vcpu = |(index, fd)| Vcpu::new(index, fd, Arc::clone(vm));
        Self { gate: Gate::new(), vcpus: fds.into_iter().enumerate().map(vcpu).collect() }
    }

    pub(crate) fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// Kernel thread ids, in the vCPUs' order; 0 for a thread that has not begun.
    pub(crate) fn thread_ids(&self) -> Vec<i32> {
        self.vcpus.iter().map(Vcpu::thread_id).collect()
    }

    /// The descriptor of a vCPU. Blocks while the vCPU is in the guest.
    pub(crate) fn fd(&self, index: usize) -> MutexGuard<'_, VcpuFd> {
        self.vcpus[index].fd()
    }

    /// Wakes every sleeping vCPU so that it checks whether it still has to wait.
    pub(crate) fn wake_sleepers(&self) {
        self.gate.wake_sleepers();
    }

    /// Whether the machine has requested that the guest runs.
    pub(crate) fn is_running(&self) -> bool {
        self.gate.running()
    }

    /// Why the guest ended; `None` if it has not.
    pub(crate) fn ended(&self) -> Option<EndReason> {
        self.gate.lock().ended.clone()
    }

    /// Waits until the guest has ended and every vCPU is parked. None after `limit`.
    pub(crate) fn wait_ended(&self, limit: Duration) -> Option<EndReason> {
        self.gate.wait_ended(limit)
    }

    /// Opens the gate. A guest with a paravirtual clock gets a notice that it was stopped, so that its
    /// watchdogs do not fire.
    pub(crate) fn run(&self) {
        for vcpu in &self.vcpus {
            // EINVAL if the guest does not use the clock: no notice is needed then.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
        self.gate.want(Wanted::Run, || {});
    }

    /// Closes the gate, kicks every vCPU and waits until all are parked.
    pub(crate) fn park_and_wait(&self) {
        self.gate.want(Wanted::Park, || self.kick_all());
        self.gate.wait_parked();
    }

    /// Records that the guest ended. A vCPU thread calls this.
    fn end(&self, reason: EndReason) {
        self.gate.end(reason, || self.kick_all());
    }

    /// Ends the threads. The gate never opens afterwards.
    pub(crate) fn quit(&self) {
        self.gate.want(Wanted::Quit, || self.kick_all());
    }

    /// Kicks the vCPUs for which `is_due` is true, if the guest is requested to run.
    fn kick_if_running(&self, is_due: impl Fn(usize) -> bool) {
        self.gate.if_running(|| self.vcpus.iter().filter(|vcpu| is_due(vcpu.index)).for_each(Vcpu::kick));
    }

    /// Must be called under the gate's lock.
    fn kick_all(&self) {
        self.vcpus.iter().for_each(Vcpu::kick);
    }
}
