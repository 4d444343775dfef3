//! A vCPU with its thread, which exists as long as the process and either runs the guest or waits.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vm_memory::ByteValued;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// A vCPU and the thread that runs it.
pub struct Vcpu {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    /// The thread locks it while the guest runs.
    fd: Mutex<VcpuFd>,
    may_run: AtomicBool,
    runs: Mutex<bool>,
    changed: Condvar,
    /// The last number that the guest printed.
    printed: AtomicU32,
}

/// All vCPU state that this guest changes.
///
/// A guest with interrupts, floating point or MSRs needs more: `crates/sterna-vmm/src/devices/cpu.rs` has
/// the full state.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct State {
    regs: kvm_regs,
    sregs: kvm_sregs,
}

// SAFETY: both are integers and arrays of integers without padding, so any bytes are a value.
unsafe impl ByteValued for State {}

impl Vcpu {
    /// Starts the thread, which waits until [`Vcpu::resume`].
    pub fn new(fd: VcpuFd) -> Result<Self, Box<dyn Error>> {
        // A signal interrupts KVM_RUN. Without a handler the signal would end the process.
        extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), ignore)?;
        let shared = Arc::new(Shared {
            fd: Mutex::new(fd),
            may_run: AtomicBool::new(false),
            runs: Mutex::new(false),
            changed: Condvar::new(),
            printed: AtomicU32::new(0),
        });
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("vcpu 0".into()).spawn(move || of_thread.run())?;
        Ok(Self { shared, thread })
    }

    /// Lets the thread run the guest.
    pub fn resume(&self) {
        self.shared.may_run.store(true, Ordering::SeqCst);
        *self.shared.runs() = true;
        self.shared.changed.notify_all();
    }

    /// Pauses the guest. After the return the guest does not run, and its last instruction is complete.
    pub fn pause(&self) {
        self.shared.may_run.store(false, Ordering::SeqCst);
        let mut runs = self.shared.runs();
        while *runs {
            // Repeated, because a signal that arrives immediately before KVM_RUN is lost.
            let _ = self.thread.kill(SIGRTMIN());
            let waited = self.shared.changed.wait_timeout(runs, Duration::from_micros(200));
            runs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the guest may run.
    pub fn is_running(&self) -> bool {
        *self.shared.runs()
    }

    /// The last number that the guest printed in this process.
    pub fn printed(&self) -> u32 {
        self.shared.printed.load(Ordering::SeqCst)
    }

    /// The registers. The vCPU must be paused.
    pub fn state(&self) -> io::Result<State> {
        let fd = self.shared.fd();
        Ok(State { regs: fd.get_regs()?, sregs: fd.get_sregs()? })
    }

    /// Sets the registers. The vCPU must be paused.
    pub fn set_state(&self, state: &State) -> io::Result<()> {
        let fd = self.shared.fd();
        fd.set_sregs(&state.sregs)?;
        Ok(fd.set_regs(&state.regs)?)
    }

    /// Resets the vCPU to real mode at `code`, with the data segment at `data`.
    pub fn reset(&self, code: u64, data: u64) -> io::Result<()> {
        let mut state = self.state()?;
        (state.sregs.cs.base, state.sregs.cs.selector) = (0, 0);
        (state.sregs.ds.base, state.sregs.ds.selector) = (data, 0);
        state.regs = kvm_regs { rip: code, rflags: 2, ..Default::default() };
        self.set_state(&state)
    }
}

impl Shared {
    /// The body of the thread.
    fn run(&self) {
        loop {
            let runs = self.runs();
            drop(self.changed.wait_while(runs, |runs| !*runs));
            self.run_guest();
            *self.runs() = false;
            self.changed.notify_all();
        }
    }

    /// Runs the guest until the vCPU must pause.
    fn run_guest(&self) {
        let mut fd = self.fd();
        loop {
            // KVM completes an instruction that caused an exit only at the next KVM_RUN. Before it pauses,
            // the loop therefore enters KVM once more with `immediate_exit`, which returns after the
            // completion.
            let last = !self.may_run.load(Ordering::SeqCst);
            fd.set_kvm_immediate_exit(last.into());
            match fd.run() {
                Ok(VcpuExit::IoOut(0x10, &[a, b, c, d])) => {
                    let number = u32::from_le_bytes([a, b, c, d]);
                    self.printed.store(number, Ordering::SeqCst);
                    println!("guest: {number}");
                }
                Err(error) if error.errno() == libc::EINTR && last => return,
                Err(error) if error.errno() == libc::EINTR => {}
                exit => {
                    eprintln!("the guest ended: {exit:?}");
                    std::process::exit(1);
                }
            }
        }
    }

    fn fd(&self) -> MutexGuard<'_, VcpuFd> {
        self.fd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn runs(&self) -> MutexGuard<'_, bool> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
