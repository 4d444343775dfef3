//! The thread of a vCPU. It enters the guest and handles its exits.
//!
//! After the last exit was handled, one more KVM_RUN with the immediate-exit flag lets the kernel complete
//! the instruction that caused the exit. Only then do registers and memory contain everything that the guest
//! did.
//!
//! If a vCPU is interrupted while the guest should run, the throttle interrupted it ([`super::throttle`]).
//! The vCPU sleeps as long as the throttle requests, then continues. A vCPU whose dirty ring is full does the
//! same after it has emptied the ring.

use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::{
    KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_IO, KVM_EXIT_IO_IN,
    KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, kvm_run,
};
use kvm_ioctls::VcpuFd;
use sterna_ram::dirty::KvmDirtyRing;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::Vcpus;
use super::throttle::Throttling;
use super::tracking::Tracking;
use super::vcpu::Vcpu;
use crate::end_reason::EndReason;
use crate::hardware::bus::Bus;

/// Objects that all vCPU threads of a machine share.
pub(crate) struct Runner {
    pub(crate) vcpus: Arc<Vcpus>,
    pub(crate) tracking: Arc<Tracking>,
    pub(crate) throttling: Arc<Throttling>,
    pub(crate) bus: Arc<Bus>,
    /// Length of a vCPU's run structure, in bytes.
    pub(crate) run_bytes: usize,
}

/// Starts the thread of vCPU `index`, which parks at the gate.
pub(crate) fn spawn(runner: &Arc<Runner>, index: usize) -> std::io::Result<JoinHandle<()>> {
    static HANDLER: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    // Without a handler, the first kick would end the process.
    (*HANDLER.get_or_init(|| register_signal_handler(SIGRTMIN(), ignore).map_err(|error| error.errno())))
        .map_err(std::io::Error::from_raw_os_error)?;
    let theirs = Arc::clone(runner);
    let vcpus = &runner.vcpus;
    vcpus.gate.enter();
    let handle = std::thread::Builder::new()
        .name(format!("vcpu{index}"))
        .spawn(move || thread(&theirs, index))
        .inspect_err(|_| vcpus.gate.leave())?;
    // The lock is held while the handle is stored. The thread cannot end before, because it ends only through
    // the gate.
    let _gate = vcpus.gate.lock();
    vcpus.vcpus[index].set_thread(Some(handle.as_pthread_t()));
    Ok(handle)
}

fn thread(runner: &Runner, index: usize) {
    let vcpus = &runner.vcpus;
    let vcpu = &vcpus.vcpus[index];
    vcpu.note_thread_id();
    // Kept across checkpoints. Otherwise a vCPU that writes one byte per checkpoint could fill the console's
    // memory.
    let mut waits_for_console = false;
    while vcpus.gate.wait(|| vcpu.set_immediate_exit(0), || vcpu.set_thread(None)) {
        let mut fd = vcpu.fd();
        run(runner, vcpu, &mut fd, &mut waits_for_console);
        waits_for_console |= complete(runner, vcpu, &mut fd);
    }
}

/// Runs the guest until the gate closes or the guest ends.
fn run(runner: &Runner, vcpu: &Vcpu, fd: &mut VcpuFd, waits_for_console: &mut bool) {
    while runner.vcpus.gate.may_run() {
        if *waits_for_console {
            runner.vcpus.gate.sleep(CONSOLE_WAIT, || runner.bus.is_console_full());
            *waits_for_console = runner.bus.is_console_full();
            continue;
        }
        match step(runner, vcpu, fd) {
            Step::Again => {}
            Step::Said => *waits_for_console = runner.bus.is_console_full(),
            Step::Reaped => runner.throttling.rest(vcpu.index),
            Step::Interrupted => {
                // Under the gate's lock: a request to park either precedes this check, or kicks the vCPU
                // after it.
                runner.vcpus.gate.if_running(|| vcpu.set_immediate_exit(0));
                runner.throttling.rest(vcpu.index);
            }
            Step::Ended(reason) => runner.vcpus.end(reason),
        }
    }
}

/// Completes the instruction whose exit was handled last. True if it wrote to a console that is now full.
fn complete(runner: &Runner, vcpu: &Vcpu, fd: &mut VcpuFd) -> bool {
    vcpu.set_immediate_exit(1);
    let mut has_said = false;
    loop {
        match step(runner, vcpu, fd) {
            Step::Again | Step::Reaped => {}
            Step::Said => has_said = true,
            Step::Interrupted => return has_said && runner.bus.is_console_full(),
            Step::Ended(reason) => {
                runner.vcpus.end(reason);
                return false;
            }
        }
    }
}

/// Interval at which a vCPU that waits for the console checks again. It need not be woken for the check.
const CONSOLE_WAIT: Duration = Duration::from_secs(1);

enum Step {
    /// An exit was handled.
    Again,
    /// An exit was handled that wrote to the guest's console.
    Said,
    /// The dirty ring was full and has been emptied.
    Reaped,
    /// No exit is pending. The kernel returned because of a kick.
    Interrupted,
    /// The guest cannot continue.
    Ended(EndReason),
}

/// Performs one KVM_RUN and handles its exit.
fn step(runner: &Runner, vcpu: &Vcpu, fd: &mut VcpuFd) -> Step {
    if let Err(error) = fd.run() {
        return match error.errno() {
            libc::EINTR | libc::EAGAIN => Step::Interrupted,
            _ => failed(vcpu, format!("KVM_RUN: {error}")),
        };
    }
    let run = fd.get_kvm_run();
    match run.exit_reason {
        KVM_EXIT_IO => port_exit(runner, vcpu, run),
        KVM_EXIT_MMIO => {
            // SAFETY: the exit reason says that this member of the union is the valid one.
            let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
            let length = (mmio.len as usize).min(mmio.data.len());
            let data = &mut mmio.data[..length];
            match mmio.is_write {
                0 => runner.bus.memory_read(mmio.phys_addr, data),
                _ => runner.bus.memory_write(mmio.phys_addr, data),
            }
            Step::Again
        }
        KVM_EXIT_INTR => Step::Interrupted,
        KVM_EXIT_IRQ_WINDOW_OPEN => Step::Again,
        KvmDirtyRing::EXIT_RING_FULL => match runner.tracking.ring() {
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

/// Handles `in`, `out` and their string forms: `count` times `size` bytes at one port.
fn port_exit(runner: &Runner, vcpu: &Vcpu, run: &mut kvm_run) -> Step {
    // SAFETY: the exit reason says that this member of the union is the valid one.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (size, count) = (usize::from(io.size), io.count as usize);
    let end = (io.data_offset as usize).checked_add(size.saturating_mul(count));
    if !matches!(size, 1 | 2 | 4) || end.is_none_or(|end| end > runner.run_bytes) {
        return failed(vcpu, format!("port exit of {count} × {size} bytes at {:#x}", io.data_offset));
    }
    // SAFETY: the kernel put the data into the mapped run structure. The range was checked against its size,
    // and no other code uses it while this vCPU is outside the guest.
    let data = unsafe {
        let start = std::ptr::from_mut(run).cast::<u8>().add(io.data_offset as usize);
        std::slice::from_raw_parts_mut(start, size * count)
    };
    let mut ended = None;
    for item in data.chunks_exact_mut(size) {
        if u32::from(io.direction) == KVM_EXIT_IO_IN {
            runner.bus.port_read(io.port, item);
        } else {
            ended = ended.or(runner.bus.port_write(io.port, item));
        }
    }
    let is_said = u32::from(io.direction) != KVM_EXIT_IO_IN && runner.bus.is_said(io.port);
    ended.map_or(if is_said { Step::Said } else { Step::Again }, Step::Ended)
}
