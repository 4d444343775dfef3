//! One vCPU: its descriptor, and how it is called out of the guest.
//!
//! A kick is two things: KVM's immediate-exit flag, which makes a KVM_RUN that has not begun return at
//! once, and a signal (SIGRTMIN, whose handler does nothing), which ends one that has.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering};

use kvm_ioctls::VcpuFd;
use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::signal::SIGRTMIN;

use crate::hardware::vm::KvmVm;

/// One vCPU, as the machine's threads share it.
pub(crate) struct Vcpu {
    pub(crate) index: usize,
    fd: Mutex<VcpuFd>,
    /// Where the kernel looks for the immediate-exit flag: in the run structure that `fd` keeps mapped.
    immediate_exit: *const AtomicU8,
    /// The thread's pthread_t; 0 before it has begun and after it has ended.
    thread: AtomicU64,
    /// The thread's number for the kernel; 0 before it has begun.
    thread_id: AtomicI32,
    /// After `fd`, which keeps the VM open: the VM's RAM stays mapped for as long.
    _vm: Arc<KvmVm>,
}

// SAFETY: the raw pointer is only used for atomic accesses to a byte that lives as long as `fd`, which is
// owned by the same value and never replaced; everything else is Send and Sync by itself.
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

    /// The descriptor. Waits for as long as the vCPU is in the guest.
    pub(crate) fn fd(&self) -> MutexGuard<'_, VcpuFd> {
        self.fd.lock()
    }

    /// Calls the vCPU out of the guest. Call under the gate's lock.
    pub(super) fn kick(&self) {
        self.set_immediate_exit(1);
        let thread = self.thread.load(Ordering::Acquire);
        if thread != 0 {
            // SAFETY: the thread clears the field under the gate's lock, which the caller holds, before it
            // ends, so the id is that of a living thread.
            unsafe { libc::pthread_kill(thread, SIGRTMIN()) };
        }
    }

    /// The thread that [`Vcpu::kick`] signals, from now on; `None`: none. Call under the gate's lock.
    pub(super) fn set_thread(&self, thread: Option<libc::pthread_t>) {
        self.thread.store(thread.unwrap_or(0), Ordering::Release);
    }

    /// The calling thread is this vCPU's.
    pub(super) fn note_thread_id(&self) {
        // SAFETY: it takes nothing and cannot fail.
        let id = unsafe { libc::gettid() };
        self.thread_id.store(id, Ordering::Release);
    }

    /// The thread's number for the kernel; 0 before it has begun.
    pub(super) fn thread_id(&self) -> i32 {
        self.thread_id.load(Ordering::Acquire)
    }

    /// Whether the kernel is to leave the guest at once; for the vCPU's own thread.
    pub(super) fn set_immediate_exit(&self, value: u8) {
        // SAFETY: the byte is part of the run structure that `self.fd` keeps mapped; the kernel reads it only.
        unsafe { &*self.immediate_exit }.store(value, Ordering::Release);
    }
}
