//! One vCPU: its descriptor, its thread, and how it is called out of the guest.
//!
//! A kick is two things: KVM's immediate-exit flag, which makes a KVM_RUN that has not begun return at
//! once, and a signal (SIGRTMIN, whose handler does nothing), which ends one that has. After the last
//! exit was answered one more KVM_RUN with the flag set lets the kernel complete the instruction that
//! caused it; only then do registers and memory hold all that the guest did.
//!
//! A vCPU that is called out while the guest is to run on was called by the throttle ([`super::throttle`]): it
//! sleeps as long as that says and runs on. So does one whose dirty ring was full, after it has emptied it.

use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use kvm_bindings::{
    KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_IO, KVM_EXIT_IO_IN,
    KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, kvm_run,
};
use kvm_ioctls::VcpuFd;
use parking_lot::{Mutex, MutexGuard};
use sterna_ram::dirty::KvmDirtyRing;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::Shared;
use super::gate::EndReason;

/// A vCPU as the machine's threads share it.
pub(crate) struct Vcpu {
    pub(crate) index: usize,
    fd: Mutex<VcpuFd>,
    /// Where the kernel looks for the immediate-exit flag: in the run structure that `fd` keeps mapped.
    immediate_exit: *const AtomicU8,
    /// The thread's pthread_t; 0 before it has begun and after it has ended.
    thread: AtomicU64,
}

// SAFETY: the raw pointer is only used for atomic accesses to a byte that lives as long as `fd`, which is
// owned by the same value and never replaced; everything else is Send and Sync by itself.
unsafe impl Send for Vcpu {}
// SAFETY: as above.
unsafe impl Sync for Vcpu {}

impl Vcpu {
    pub(crate) fn new(index: usize, mut fd: VcpuFd) -> Self {
        let immediate_exit = std::ptr::from_mut(&mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        Self { index, fd: Mutex::new(fd), immediate_exit, thread: AtomicU64::new(0) }
    }

    /// The descriptor. Waits for as long as the vCPU is in the guest.
    pub(crate) fn fd(&self) -> MutexGuard<'_, VcpuFd> {
        self.fd.lock()
    }

    /// Calls the vCPU out of the guest. Call under the gate's lock.
    pub(crate) fn kick(&self) {
        self.set_immediate_exit(1);
        let thread = self.thread.load(Ordering::Acquire);
        if thread != 0 {
            // SAFETY: the thread clears the field under the gate's lock, which the caller holds, before it
            // ends, so the id is that of a living thread.
            unsafe { libc::pthread_kill(thread as libc::pthread_t, SIGRTMIN()) };
        }
    }

    fn set_immediate_exit(&self, value: u8) {
        // SAFETY: the byte is part of the run structure that `self.fd` keeps mapped; the kernel reads it only.
        unsafe { &*self.immediate_exit }.store(value, Ordering::Release);
    }
}

/// Starts the thread of vCPU `index`; it parks at the gate.
pub(crate) fn spawn(shared: &Arc<Shared>, index: usize) -> std::io::Result<JoinHandle<()>> {
    static HANDLER: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    // Without a handler the first kick would end the process.
    (*HANDLER.get_or_init(|| register_signal_handler(SIGRTMIN(), ignore).map_err(|error| error.errno())))
        .map_err(std::io::Error::from_raw_os_error)?;
    let theirs = Arc::clone(shared);
    shared.gate.enter();
    let handle = std::thread::Builder::new()
        .name(format!("vcpu{index}"))
        .spawn(move || thread(&theirs, index))
        .inspect_err(|_| shared.gate.leave())?;
    // Under the lock, and only while the thread cannot have ended: it ends after the gate says so.
    let _gate = shared.gate.lock();
    shared.vcpus[index].thread.store(handle.as_pthread_t(), Ordering::Release);
    Ok(handle)
}

fn thread(shared: &Shared, index: usize) {
    let vcpu = &shared.vcpus[index];
    while shared.gate.wait(|| vcpu.set_immediate_exit(0), || vcpu.thread.store(0, Ordering::Release)) {
        let mut fd = vcpu.fd();
        run(shared, vcpu, &mut fd);
        complete(shared, vcpu, &mut fd);
    }
}

/// Runs the guest until the gate closes or it ends.
fn run(shared: &Shared, vcpu: &Vcpu, fd: &mut VcpuFd) {
    while shared.gate.may_run() {
        match step(shared, vcpu, fd) {
            Step::Again => {}
            Step::Reaped => shared.rest(vcpu.index),
            Step::Interrupted => {
                // Under the lock: a call to park comes after this, or was seen here.
                shared.gate.if_running(|| vcpu.set_immediate_exit(0));
                shared.rest(vcpu.index);
            }
            Step::Ended(reason) => shared.end(reason),
        }
    }
}

/// Lets the kernel finish the instruction whose exit was answered last.
fn complete(shared: &Shared, vcpu: &Vcpu, fd: &mut VcpuFd) {
    vcpu.set_immediate_exit(1);
    loop {
        match step(shared, vcpu, fd) {
            Step::Again | Step::Reaped => {}
            Step::Interrupted => return,
            Step::Ended(reason) => return shared.end(reason),
        }
    }
}

enum Step {
    /// An exit was answered.
    Again,
    /// The dirty ring was full and is empty now.
    Reaped,
    /// Nothing is pending; the kernel came back because it was asked to.
    Interrupted,
    /// The guest cannot go on.
    Ended(EndReason),
}

/// One KVM_RUN and the answer to its exit.
fn step(shared: &Shared, vcpu: &Vcpu, fd: &mut VcpuFd) -> Step {
    if let Err(error) = fd.run() {
        return match error.errno() {
            libc::EINTR | libc::EAGAIN => Step::Interrupted,
            _ => failed(vcpu, format!("KVM_RUN: {error}")),
        };
    }
    let run = fd.get_kvm_run();
    match run.exit_reason {
        KVM_EXIT_IO => port_exit(shared, vcpu, run),
        KVM_EXIT_MMIO => {
            // SAFETY: the exit reason says that this member of the union is the valid one.
            let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
            if mmio.is_write == 0 {
                mmio.data.fill(0xff);
            }
            Step::Again
        }
        KVM_EXIT_INTR => Step::Interrupted,
        KVM_EXIT_IRQ_WINDOW_OPEN => Step::Again,
        KvmDirtyRing::EXIT_RING_FULL => match shared.tracking.ring() {
            Some(ring) => match ring.reap_full(vcpu.index) {
                Ok(()) => Step::Reaped,
                Err(error) => failed(vcpu, error.to_string()),
            },
            None => failed(vcpu, "a dirty ring is full, but none is enabled".into()),
        },
        KVM_EXIT_SHUTDOWN | KVM_EXIT_SYSTEM_EVENT => {
            let rip = fd.get_regs().map_or(0, |regs| regs.rip);
            Step::Ended(EndReason::Shutdown { vcpu: vcpu.index, rip })
        }
        KVM_EXIT_INTERNAL_ERROR => {
            // SAFETY: as for MMIO.
            let internal = unsafe { run.__bindgen_anon_1.internal };
            let words = &internal.data[..(internal.ndata as usize).min(internal.data.len())];
            let rip = fd.get_regs().map_or(0, |regs| regs.rip);
            let why = format!("KVM internal error {} at rip {rip:#x}, data {words:x?}", internal.suberror);
            failed(vcpu, why)
        }
        KVM_EXIT_FAIL_ENTRY => {
            // SAFETY: as for MMIO.
            let entry = unsafe { run.__bindgen_anon_1.fail_entry };
            failed(
                vcpu,
                format!("entry refused by the hardware, reason {:#x}", entry.hardware_entry_failure_reason),
            )
        }
        other => failed(vcpu, format!("KVM exit {other}, which this machine does not use")),
    }
}

fn failed(vcpu: &Vcpu, why: String) -> Step {
    Step::Ended(EndReason::Failed { vcpu: vcpu.index, why })
}

/// `in`, `out`, and their string forms: `count` times `size` bytes at one port.
fn port_exit(shared: &Shared, vcpu: &Vcpu, run: &mut kvm_run) -> Step {
    // SAFETY: the exit reason says that this member of the union is the valid one.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (size, count) = (usize::from(io.size), io.count as usize);
    let end = (io.data_offset as usize).checked_add(size.saturating_mul(count));
    if !matches!(size, 1 | 2 | 4) || end.is_none_or(|end| end > shared.run_bytes) {
        return failed(vcpu, format!("port exit of {count} × {size} bytes at {:#x}", io.data_offset));
    }
    // SAFETY: the kernel put the data into the mapped run structure; the range was checked against its
    // size, and nobody else uses it while this vCPU is out of the guest.
    let data = unsafe {
        let start = std::ptr::from_mut(run).cast::<u8>().add(io.data_offset as usize);
        std::slice::from_raw_parts_mut(start, size * count)
    };
    let mut ended = None;
    for item in data.chunks_exact_mut(size) {
        if u32::from(io.direction) == KVM_EXIT_IO_IN {
            shared.bus.port_read(io.port, item);
        } else {
            ended = ended.or(shared.bus.port_write(io.port, item));
        }
    }
    ended.map_or(Step::Again, Step::Ended)
}
