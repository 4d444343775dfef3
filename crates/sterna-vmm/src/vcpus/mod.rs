//! The vCPUs of a machine: they run, or are parked at the gate.

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
    /// Of these descriptors, which are `vm`'s. All are parked; [`thread::spawn`] starts their threads.
    pub(crate) fn new(fds: Vec<VcpuFd>, vm: &Arc<KvmVm>) -> Self {
        let vcpu = |(index, fd)| Vcpu::new(index, fd, Arc::clone(vm));
        Self { gate: Gate::new(), vcpus: fds.into_iter().enumerate().map(vcpu).collect() }
    }

    pub(crate) fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// The threads' numbers for the kernel, in the vCPUs' order; 0 for one that has not begun.
    pub(crate) fn thread_ids(&self) -> Vec<i32> {
        self.vcpus.iter().map(Vcpu::thread_id).collect()
    }

    /// A vCPU's descriptor. Waits for as long as the vCPU is in the guest.
    pub(crate) fn fd(&self, index: usize) -> MutexGuard<'_, VcpuFd> {
        self.vcpus[index].fd()
    }

    /// Whether the guest runs now.
    pub(crate) fn is_running(&self) -> bool {
        self.gate.running()
    }

    /// Why the guest ended, if it did.
    pub(crate) fn ended(&self) -> Option<EndReason> {
        self.gate.lock().ended.clone()
    }

    /// Waits until the guest has ended by itself and every vCPU is out of it; None if it has not within `limit`.
    pub(crate) fn wait_ended(&self, limit: Duration) -> Option<EndReason> {
        self.gate.wait_ended(limit)
    }

    /// Opens the gate. A guest with a paravirtual clock is told that it was stopped, so that its watchdogs do not fire.
    pub(crate) fn run(&self) {
        for vcpu in &self.vcpus {
            // Refused (EINVAL) where the guest does not use the clock: nothing to tell then.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
        self.gate.want(Wanted::Run, || {});
    }

    /// Closes the gate, calls every vCPU out and waits until it is.
    pub(crate) fn park_and_wait(&self) {
        self.gate.want(Wanted::Park, || self.kick_all());
        self.gate.wait_parked();
    }

    /// The guest ended by itself; called on a vCPU thread.
    fn end(&self, reason: EndReason) {
        self.gate.end(reason, || self.kick_all());
    }

    /// Ends the threads; the gate never opens again.
    pub(crate) fn quit(&self) {
        self.gate.want(Wanted::Quit, || self.kick_all());
    }

    /// Calls those out of the guest that `is_due` names, if the guest is to run.
    fn kick_if_running(&self, is_due: impl Fn(usize) -> bool) {
        self.gate.if_running(|| self.vcpus.iter().filter(|vcpu| is_due(vcpu.index)).for_each(Vcpu::kick));
    }

    /// Call under the gate's lock.
    fn kick_all(&self) {
        self.vcpus.iter().for_each(Vcpu::kick);
    }
}
