//! A whole VMM that migrates, without KVM: its guest is a thread that counts in the words of its memory.
//! `docs/embedding.md` shows this file.
//!
//! ```text
//! cargo run -p sterna --example first-vmm -- receive unix:/tmp/first
//! cargo run -p sterna --example first-vmm -- send unix:/tmp/first
//! ```
#![allow(clippy::print_stdout, reason = "the program says what happens")]

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::ram::dirty::{ExternalLog, FoundPages, VmmLog};
use sterna::ram::{Backing, DirtySource, GuestRam, PAGE_BYTES, RamBlock, RamError};
use sterna::{
    Address, Arrival, Capabilities, Device, Event, Incoming, Migration, Outcome, Parameters, RunState,
    SourceVm, TargetVm, Vm, VmError,
};

/// Bytes of guest memory.
const BYTES: u64 = 64 << 20;

/// The guest: memory, one register, and the pages that were written since the engine asked last.
struct Guest {
    ram: GuestRam,
    register: AtomicU64,
    runs: AtomicBool,
    written: Mutex<BTreeSet<u64>>,
}

impl Guest {
    fn run(&self) {
        while self.runs.load(SeqCst) {
            let count = self.register.fetch_add(1, SeqCst);
            let page = count % (BYTES / PAGE_BYTES);
            self.ram.block(0).write_u64(page * PAGE_BYTES, count).expect("a word of guest memory");
            self.written.lock().expect("no panic").insert(page);
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The dirty source: this VMM keeps its own log.
struct Log(Arc<Guest>);

impl VmmLog for Log {
    fn start(&self) -> io::Result<()> {
        self.0.written.lock().expect("no panic").clear();
        Ok(())
    }
    fn stop(&self) -> io::Result<()> {
        Ok(())
    }
    fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()> {
        let written = std::mem::take(&mut *self.0.written.lock().expect("no panic"));
        written.iter().for_each(|page| found.pages(0, *page, 1));
        Ok(())
    }
}

/// The register as a device.
struct Register(Arc<Guest>);

impl Device for Register {
    fn name(&self) -> String {
        "register".into()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(self.0.register.load(SeqCst).to_le_bytes().to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        let body: [u8; 8] =
            body.try_into().map_err(|_| VmError::new("load the register", "not eight bytes"))?;
        self.0.register.store(u64::from_le_bytes(body), SeqCst);
        Ok(())
    }
}

/// The VM, as the engine sees it.
pub struct Machine {
    guest: Arc<Guest>,
    dirty: ExternalLog<Log>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Machine {
    /// A machine whose guest does not run.
    pub fn new() -> Result<Self, RamError> {
        // A VMM that has mapped its memory uses `RamBlock::from_external` here.
        let ram = GuestRam::new(vec![RamBlock::new("ram", BYTES, Backing::Memfd)?])?;
        let guest = Arc::new(Guest {
            ram: ram.clone(),
            register: AtomicU64::new(0),
            runs: AtomicBool::new(false),
            written: Mutex::default(),
        });
        let dirty = ExternalLog::new(&ram, Log(Arc::clone(&guest)));
        Ok(Self { guest, dirty, thread: Mutex::default() })
    }
    /// Starts the guest, if it does not run.
    pub fn start_guest(&self) {
        let mut thread = self.thread.lock().expect("no panic");
        if thread.is_none() {
            self.guest.runs.store(true, SeqCst);
            let guest = Arc::clone(&self.guest);
            *thread = Some(std::thread::spawn(move || guest.run()));
        }
    }
    /// The guest's register: how often it has counted.
    pub fn register(&self) -> u64 {
        self.guest.register.load(SeqCst)
    }
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        "first-vmm-1".into()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![Arc::new(Register(Arc::clone(&self.guest)))]
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }
    fn run_state(&self) -> RunState {
        if self.guest.runs.load(SeqCst) { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.guest.runs.store(false, SeqCst);
        match self.thread.lock().expect("no panic").take() {
            Some(thread) => thread.join().map_err(|_| VmError::new("stop the guest", "its thread panicked")),
            None => Ok(()),
        }
    }
    fn resume(&self) -> Result<(), VmError> {
        self.start_guest();
        Ok(())
    }
}

impl TargetVm for Machine {
    fn start(&self) -> Result<(), VmError> {
        self.start_guest();
        Ok(())
    }
    fn reset(&self) {
        self.guest.register.store(0, SeqCst);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [verb, address] = &arguments[..] else { return Err("first-vmm send|receive ADDRESS".into()) };
    // "tcp:HOST:PORT", "unix:PATH", "fd:NUMBER" or "file:PATH".
    let address: Address = address.parse()?;
    let machine = Arc::new(Machine::new()?);
    let (parameters, capabilities) = (Parameters::default(), Capabilities::default());
    // A closure is an observer; `Arc::new(())` is one that ignores all events.
    let observer = Arc::new(|event: &Event| println!("{event:?}"));
    if verb == "send" {
        // The operator's start. `while_free` refuses it while a migration or another host has the guest.
        machine.ram().while_free(|| machine.start_guest()).map_err(|custody| format!("{custody:?}"))?;
        let migration = Migration::start(machine.clone(), &address, parameters, capabilities, observer)?;
        match migration.wait() {
            Outcome::Completed => println!("the guest left at {}", machine.register()),
            Outcome::Failed { error, held: true } => println!("stopped here until a retry: {error}"),
            Outcome::Failed { error, .. } => println!("the guest continues here: {error}"),
            other => println!("the guest continues here: {other:?}"),
        }
    } else {
        let incoming = Incoming::listen(machine.clone(), &address, parameters, capabilities, observer)?;
        match incoming.wait() {
            Arrival::Completed(state) => println!("{state:?} at {}", machine.register()),
            Arrival::Failed(error) => return Err(error.into()),
            _ => {}
        }
        // The guest runs meanwhile. A source that has lost the acknowledgement can ask for a minute.
        incoming.settle(Duration::from_secs(60));
        println!("counted on to {}", machine.register());
    }
    Ok(())
}
