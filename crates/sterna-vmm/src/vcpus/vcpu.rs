//! One vCPU: its descriptor, and the kick that interrupts it in the guest.
//!
//! A kick has two parts. KVM's immediate-exit flag makes a KVM_RUN that has not begun return immediately. A
//! signal (SIGRTMIN, whose handler does nothing) ends a KVM_RUN that has begun.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering};

use kvm_ioctls::VcpuFd;
use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::signal::SIGRTMIN;

use crate::hardware::vm::KvmVm;

/// One vCPU, shared by the machine's threads.
pub(crate) struct Vcpu {
    pub(crate) index: usize,
    fd: Mutex<VcpuFd>,
    /// Address of the immediate-exit flag in the run structure, which `fd` keeps mapped.
    immediate_exit: *const AtomicU8,
    /// The thread's pthread_t. 0 before it has begun and after it has ended.
    thread: AtomicU64,
    /// The thread's kernel id. 0 before it has begun.
    thread_id: AtomicI32,
    /// Declared after `fd`, which keeps the VM open. The VM's RAM therefore stays mapped until `fd` is
    /// dropped.
    _vm: Arc<KvmVm>,
}

// SAFETY: the raw pointer is only used for atomic accesses to a byte that lives as long as `fd`. The same
// value owns `fd` and never replaces it. All other fields are Send and Sync.
unsafe impl Send for Vcpu {}
// SAFETY: as above.
unsafe impl Sync for Vcpu {}

impl Vcpu {
    pub(crate) fn new(index: usize, mut fd: VcpuFd, vm: Arc<KvmVm>) -> Self {
        let immediate_exit = std::ptr::from_mut(&mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        Self {
            index,
            fd: Mutex::new(fd),
            immediate_exit,
            thread: AtomicU64::new(0),
            thread_id: AtomicI32::new(0),
            _vm: vm,
        }
    }

    /// Locks the descriptor. Blocks while the vCPU is in the guest.
    pub(crate) fn fd(&self) -> MutexGuard<'_, VcpuFd> {
        self.fd.lock()
    }

    /// Interrupts the vCPU in the guest. Must be called under the gate's lock.
    pub(super) fn kick(&self) {
        self.set_immediate_exit(1);
        let thread = self.thread.load(Ordering::Acquire);
        if thread != 0 {
            // SAFETY: the thread clears the field under the gate's lock before it ends. The caller holds that
            // lock, so the id is a living thread's.
            unsafe { libc::pthread_kill(thread, SIGRTMIN()) };
        }
    }

    /// Sets the thread that [`Vcpu::kick`] signals; `None` for no thread. Must be called under the gate's
    /// lock.
    pub(super) fn set_thread(&self, thread: Option<libc::pthread_t>) {
        self.thread.store(thread.unwrap_or(0), Ordering::Release);
    }

    /// Records that the calling thread runs this vCPU.
    pub(super) fn note_thread_id(&self) {
        // SAFETY: the call takes no arguments and cannot fail.
        let id = unsafe { libc::gettid() };
        self.thread_id.store(id, Ordering::Release);
    }

    /// Kernel id of the thread. 0 before it has begun.
    pub(super) fn thread_id(&self) -> i32 {
        self.thread_id.load(Ordering::Acquire)
    }

    /// Sets whether the kernel leaves the guest immediately. Only the vCPU's own thread, or a kick, calls
    /// this.
    pub(super) fn set_immediate_exit(&self, value: u8) {
        // SAFETY: the byte is part of the run structure that `self.fd` keeps mapped; the kernel reads it only.
        unsafe { &*self.immediate_exit }.store(value, Ordering::Release);
    }
}
