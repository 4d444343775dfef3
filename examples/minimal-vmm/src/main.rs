//! The smallest KVM machine that Sterna migrates: one vCPU, 1 MiB of RAM, a console, a lock.
//!
//! In this order: the operator's commands, the engine's traits, and how a vCPU runs, stops and is saved.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::{env, error::Error, fs::File, mem::transmute, process, time::Duration};

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use sterna::ram::dirty::{KvmDirtyLog, KvmSlot};
use sterna::ram::{Backing, DirtySource, GuestRam, RamBlock};
use sterna::{Address, Arrival, Capabilities, Event, Incoming, Migration, Outcome, Parameters};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Vm, VmError};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// The numbers that the guest has printed in this process.
static PRINTED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run"] => run(None),
        ["run", "--to", address] => run(Some(&address.parse()?)),
        ["receive", address] => receive(&address.parse()?),
        ["demo"] => demo(),
        _ => Err("usage: minimal-vmm run [--to tcp:HOST:PORT] | receive tcp:HOST:PORT | demo".into()),
    }
}

/// Runs both sides in one process. Fails unless the guest continues at the target where it left the source.
fn demo() -> Result<(), Box<dyn Error>> {
    let (source, target) = (Machine::new("source")?, Machine::new("target")?);
    let incoming = listen(&target, &"tcp:127.0.0.1:0".parse()?)?;
    source.boot()?;
    watch(20)?;
    migrate(&source, &incoming.address())?;
    watch(20)?;
    let unbroken = PRINTED.lock().unwrap().windows(2).all(|two| two[0] + 1 == two[1]);
    if unbroken { Ok(()) } else { Err("the guest lost count".into()) }
}

fn run(to: Option<&Address>) -> Result<(), Box<dyn Error>> {
    let machine = Machine::new("source")?;
    machine.boot()?;
    watch(if to.is_some() { 20 } else { usize::MAX })?;
    to.map_or(Ok(()), |to| migrate(&machine, to))
}

fn receive(at: &Address) -> Result<(), Box<dyn Error>> {
    let machine = Machine::new("target")?;
    // Keep `incoming` after success: a source that lost the acknowledgement asks it for the guest's fate.
    let incoming = listen(&machine, at)?;
    match incoming.wait() {
        Arrival::Completed(_) => watch(usize::MAX),
        other => Err(format!("{other:?}").into()),
    }
}

/// Sends the guest away. `start` returns immediately. Until `wait` returns, any thread may `cancel()` the
/// migration, ask for `statistics()` (enough for a progress bar) or change its bandwidth with `set_live()`.
fn migrate(machine: &Arc<Machine>, to: &Address) -> Result<(), Box<dyn Error>> {
    let (parameters, capabilities) = (Parameters::default(), Capabilities::default());
    let observer = Arc::new(|event: &Event| println!("source: {event:?}"));
    let migration = Migration::start(machine.clone(), to, parameters, capabilities, observer)?;
    match migration.wait() {
        Outcome::Completed => {
            println!("source: downtime {:.1?}", migration.statistics().downtime.unwrap_or_default());
            Ok(())
        }
        // Until the commit nothing is lost: the guest continues here, and another migration may begin.
        other => Err(format!("{other:?}").into()),
    }
}

/// Binds the address and returns. Settings must equal the source's, because QEMU's stream negotiates none.
fn listen(machine: &Arc<Machine>, at: &Address) -> Result<Incoming, Box<dyn Error>> {
    let (parameters, capabilities) = (Parameters::default(), Capabilities::default());
    let observer = Arc::new(|event: &Event| println!("target: {event:?}"));
    Ok(Incoming::listen(machine.clone(), at, parameters, capabilities, observer)?)
}

/// Waits until the guest has printed `more` numbers.
fn watch(more: usize) -> Result<(), Box<dyn Error>> {
    let until = PRINTED.lock().unwrap().len().saturating_add(more);
    while PRINTED.lock().unwrap().len() < until {
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

struct Machine {
    cpu: Arc<Cpu>,
    thread: Mutex<Option<JoinHandle<VcpuFd>>>,
    dirty: KvmDirtyLog,
    lock: Arc<Lock>,
    ram: GuestRam,
}

impl Machine {
    /// A machine without a guest. [`Machine::boot`] starts one, or a migration delivers one.
    fn new(name: &'static str) -> Result<Arc<Self>, Box<dyn Error>> {
        let vm = Kvm::new()?.create_vm()?;
        vm.set_tss_address(0xfffb_d000)?; // Real mode on Intel needs three pages that are not RAM.
        let ram = GuestRam::new(vec![RamBlock::new("ram", 1 << 20, Backing::Memfd)?])?;
        let (memory_size, userspace_addr) = (ram.total_bytes(), ram.block(0).host_address() as u64);
        let region = kvm_userspace_memory_region { memory_size, userspace_addr, ..Default::default() };
        // SAFETY: the region is the block's whole mapping, which outlives the vCPU's last run (see `drop`).
        unsafe { vm.set_user_memory_region(region) }?;
        let slot = KvmSlot { pages: ram.total_pages(), ..Default::default() };
        // SAFETY: `vm` keeps the descriptor open for longer than this borrow.
        let vm_fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }.try_clone_to_owned()?;
        let dirty = KvmDirtyLog::new(vm_fd, vec![slot], ram.clone())?;
        let path = env::temp_dir().join("minimal-vmm.lock");
        let lock = Arc::new(Lock(File::options().create(true).append(true).open(path)?));
        let cpu = Arc::new(Cpu::new(vm.create_vcpu(0)?, name)?);
        Ok(Arc::new(Self { cpu, thread: Mutex::default(), dirty, lock, ram }))
    }

    /// Starts the guest at its first instruction.
    fn boot(&self) -> Result<(), Box<dyn Error>> {
        self.lock.acquire()?;
        self.ram.block(0).write(CODE, &GUEST)?;
        Ok(self.start()?)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        "minimal-1".into()
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![self.cpu.clone()]
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        vec![self.lock.clone()]
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }
    fn run_state(&self) -> RunState {
        if self.thread.lock().unwrap().is_some() { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        let mut thread = self.thread.lock().unwrap();
        let Some(running) = thread.take() else { return Ok(()) };
        self.cpu.may_run.store(false, SeqCst);
        // Repeated, because a signal that arrives between the check of `may_run` and KVM_RUN is lost.
        while !running.is_finished() {
            let _ = running.kill(SIGRTMIN());
            thread::sleep(Duration::from_micros(100));
        }
        *self.cpu.fd.lock().unwrap() = running.join().ok();
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        let mut thread = self.thread.lock().unwrap();
        if let Some(fd) = self.cpu.fd.lock().unwrap().take() {
            self.cpu.may_run.store(true, SeqCst);
            let cpu = self.cpu.clone();
            *thread = Some(thread::spawn(move || cpu.run(fd)));
        }
        Ok(())
    }
}

impl TargetVm for Machine {
    fn start(&self) -> Result<(), VmError> {
        self.resume()
    }
    fn reset(&self) {} // The engine empties the RAM, and the next guest sets every register.
}

/// A lock on a file, which prevents two guests from using one disk. It changes hands while neither side
/// runs the guest.
struct Lock(File);

impl Hook for Lock {
    fn name(&self) -> String {
        "lock".into()
    }
    fn release(&self) -> Result<(), VmError> {
        self.0.unlock().map_err(|error| VmError::new("unlock", error))
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.acquire()
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.0.try_lock().map_err(|error| VmError::new("lock (is another minimal-vmm running?)", error))
    }
    fn give_back(&self) {
        let _ = self.0.unlock();
    }
}

/// A vCPU. `fd` contains the descriptor while the guest is stopped; the thread owns it while the guest
/// runs.
struct Cpu {
    fd: Mutex<Option<VcpuFd>>,
    may_run: AtomicBool,
    name: &'static str,
}

impl Cpu {
    /// A vCPU in real mode at the guest's first instruction. The 64 KiB that the guest counts are the DS
    /// segment.
    fn new(fd: VcpuFd, name: &'static str) -> Result<Self, Box<dyn Error>> {
        let mut sregs = fd.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.ds.base, sregs.ds.selector) = (0x1_0000, 0x1000);
        fd.set_sregs(&sregs)?;
        fd.set_regs(&kvm_regs { rip: CODE, rflags: 2, ..Default::default() })?;
        // A signal interrupts KVM_RUN. Without a handler the signal would end the process.
        extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), ignore)?;
        Ok(Self { fd: Mutex::new(Some(fd)), may_run: false.into(), name })
    }

    fn run(&self, mut fd: VcpuFd) -> VcpuFd {
        loop {
            // KVM completes an instruction that caused an exit only at the next KVM_RUN. Before it stops,
            // the loop therefore enters KVM once more with `immediate_exit`, which returns after the
            // completion.
            let last = !self.may_run.load(SeqCst);
            fd.set_kvm_immediate_exit(last.into());
            match fd.run() {
                Ok(VcpuExit::IoOut(0x10, &[a, b, c, d])) => self.print(u32::from_le_bytes([a, b, c, d])),
                Err(error) if error.errno() == libc::EINTR && last => return fd,
                Err(error) if error.errno() == libc::EINTR => {}
                exit => {
                    eprintln!("{}: the guest ended: {exit:?}", self.name);
                    process::exit(1);
                }
            }
        }
    }

    fn print(&self, number: u32) {
        println!("{}: the guest printed {number}", self.name);
        PRINTED.lock().unwrap().push(number);
    }
}

/// All vCPU state that this guest changes. A guest with floating point, interrupts or MSRs needs more.
#[repr(C)]
struct State(kvm_regs, kvm_sregs);
type Body = [u8; size_of::<State>()];

impl Device for Cpu {
    fn name(&self) -> String {
        "cpu".into()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        let fd = self.fd.lock().unwrap();
        let get = |fd: &VcpuFd| Some(State(fd.get_regs().ok()?, fd.get_sregs().ok()?));
        let state = fd.as_ref().and_then(get).ok_or_else(|| VmError::new("vCPU", "no registers"))?;
        // SAFETY: integers without padding between them.
        Ok(unsafe { transmute::<State, Body>(state) }.to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let body: Body = body.try_into().map_err(|error| VmError::new("section cpu", error))?;
        // SAFETY: any bytes are valid integers. KVM checks their meaning, and a wrong value can harm only
        // the guest.
        let State(regs, sregs) = unsafe { transmute::<Body, State>(body) };
        let fd = self.fd.lock().unwrap();
        let set = |fd: &VcpuFd| fd.set_sregs(&sregs).and_then(|()| fd.set_regs(&regs)).ok();
        fd.as_ref().and_then(set).ok_or_else(|| VmError::new("vCPU", "KVM refuses the registers"))
    }
}

/// Increments every word of 64 KiB, sweep after sweep, and prints each count. Halts at a word with an older
/// count.
#[rustfmt::skip]
const GUEST: [u8; 23] = [
    0x66, 0x40,                                     // sweep:  inc eax
    0x66, 0xff, 0x05, 0x66, 0x39, 0x05, 0x75, 0x0a, // word:   inc dword ptr [di]; cmp [di], eax; jne broken
    0x83, 0xc7, 0x04, 0x75, 0xf3,                   //         add di, 4; jnz word
    0x66, 0xe7, 0x10, 0xeb, 0xec,                   //         out 0x10, eax; jmp sweep
    0xf4, 0xeb, 0xfd,                               // broken: hlt; jmp broken
];
const CODE: u64 = 0x1000; // Address of the code.
