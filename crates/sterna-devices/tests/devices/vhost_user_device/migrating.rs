//! Tests that migrate a guest whose device works continuously. Every answer must match the device's history,
//! although requests are in flight when the guest stops.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sterna::{
    Address, Arrival, Capabilities, Device, Incoming, Migration, Outcome, Parameters, RunState, SourceVm,
    TargetVm, Vm, VmError,
};
use sterna_devices::vhost_user::{VhostUserLog, VhostUserSection};
use sterna_ram::dirty::{Combined, DirtySource, SoftwareLog, VhostLog};
use sterna_ram::{GuestRam, PAGE_SIZE};
use tempfile::TempDir;

use super::machine::{ANSWERS, Machine, REQUESTS, RING, whole};
use crate::back_end::{Fault, VERSION_1};
use crate::model::{Model, mix};
use crate::virtqueue::{PATIENCE, Virtqueue};

const STATE_BYTES: usize = 3 << 20;
/// Number of requests in flight at any time.
const OPEN: usize = 16;

/// The state of the guest's driver, as a vCPU's registers would contain it. Both machines share it; it runs
/// on one only.
#[derive(Default)]
struct Driver {
    vcpu: Mutex<Registers>,
    answered: AtomicU64,
}

/// The registers of [`Driver`].
#[derive(Default)]
struct Registers {
    /// Requests in flight, and the addresses of their answers.
    open: VecDeque<(u64, u64)>,
    next: u64,
    /// Queue and model while the driver is stopped.
    stopped: Option<(Virtqueue, Model)>,
}

/// A machine whose only vCPU is a thread that drives the device.
struct Guest {
    machine: Mutex<Machine>,
    ram: GuestRam,
    driver: Arc<Driver>,
    writes: Arc<SoftwareLog>,
    tracking: Combined,
    devices: Vec<Arc<dyn Device>>,
    runs: AtomicBool,
    vcpu: Mutex<Option<JoinHandle<()>>>,
    me: Weak<Guest>,
}

impl Guest {
    fn new(machine: Machine, driver: Arc<Driver>) -> Arc<Self> {
        let writes = Arc::new(SoftwareLog::new(&machine.ram));
        let log = Arc::new(VhostLog::new(&machine.ram, vec![whole()]).expect("a log"));
        let log = Arc::new(VhostUserLog::new(log, vec![Arc::clone(&machine.device)]));
        let tracking = Combined::new(vec![Arc::clone(&writes) as Arc<dyn DirtySource>, log]);
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(VhostUserSection(Arc::clone(&machine.device)))];
        Arc::new_cyclic(|me| Self {
            ram: machine.ram.clone(),
            machine: Mutex::new(machine),
            driver,
            writes,
            tracking,
            devices,
            runs: AtomicBool::new(false),
            vcpu: Mutex::default(),
            me: me.clone(),
        })
    }

    fn go(&self) {
        if self.runs.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Some((queue, model)) = self.driver.vcpu.lock().expect("no panic").stopped.take() {
            let mut machine = self.machine.lock().expect("no panic");
            (machine.queue, machine.model) = (queue, model);
        }
        let me = self.me.upgrade().expect("it is in use");
        *self.vcpu.lock().expect("no panic") = Some(thread::spawn(move || {
            while me.runs.load(Ordering::SeqCst) {
                me.step();
            }
        }));
    }

    fn halt(&self) -> Result<(), VmError> {
        self.runs.store(false, Ordering::SeqCst);
        let Some(vcpu) = self.vcpu.lock().expect("no panic").take() else { return Ok(()) };
        vcpu.join().map_err(|_| VmError::new("vcpu", "an answer was wrong"))?;
        let machine = self.machine.lock().expect("no panic");
        let registers = (machine.queue.clone(), machine.model.clone());
        self.driver.vcpu.lock().expect("no panic").stopped = Some(registers);
        Ok(())
    }

    /// Submits requests and checks the answer to one.
    fn step(&self) {
        let mut machine = self.machine.lock().expect("no panic");
        let mut driver = self.driver.vcpu.lock().expect("no panic");
        while driver.open.len() < OPEN {
            let request = driver.next;
            let answer = ANSWERS + mix(request) % 3000 * PAGE_SIZE as u64 + 8 * (request % 64);
            assert!(machine.submit(request, answer, 4096));
            driver.open.push_back((request, answer));
            driver.next += 1;
        }
        for page in [RING, RING + 4096, REQUESTS] {
            self.writes.mark(0, page / PAGE_SIZE as u64);
        }
        let (request, answer) = driver.open.pop_front().expect("some are open");
        // Two requests may share an address, so the answer is intact only until the next one is written
        // there.
        if driver.open.iter().all(|(_, other)| answer.abs_diff(*other) > 8192) {
            machine.expect(request, answer, 4096);
        } else {
            machine.expect_anything(request, 4096);
        }
        self.driver.answered.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until `more` further requests were answered.
    fn wait(&self, more: u64) {
        let answered = || self.driver.answered.load(Ordering::SeqCst);
        let (begin, wanted) = (Instant::now(), answered() + more);
        while answered() < wanted {
            assert!(begin.elapsed() < PATIENCE, "{} of {wanted} requests were answered", answered());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Vm for Guest {
    fn machine_type(&self) -> String {
        "driver".into()
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.clone()
    }
}

impl SourceVm for Guest {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.tracking
    }
    fn run_state(&self) -> RunState {
        if self.runs.load(Ordering::SeqCst) { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.halt()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.go();
        Ok(())
    }
}

impl TargetVm for Guest {
    fn start(&self) -> Result<(), VmError> {
        self.go();
        Ok(())
    }
    fn reset(&self) {}
}

/// A running machine with its guest.
fn source(directory: &Path, fault: Fault) -> Arc<Guest> {
    let machine = Machine::waiting(directory, "source", STATE_BYTES, fault, PATIENCE);
    machine.device.start(VERSION_1, &[machine.queue.ring()]).expect("a good ring");
    let vm = Guest::new(machine, Arc::default());
    vm.go();
    vm.wait(100);
    vm
}

/// A machine that waits for the guest of `source`.
fn target(directory: &Path, name: &str, fault: Fault, source: &Guest) -> Arc<Guest> {
    let machine = Machine::target(directory, name, fault);
    Guest::new(machine, Arc::clone(&source.driver))
}

fn migrate(source: &Arc<Guest>, target: &Arc<Guest>, channels: u8) -> (Outcome, Arrival) {
    let params =
        Parameters { multifd_channels: channels.max(1), max_bandwidth_bytes: 0, ..Parameters::default() };
    let capabilities = Capabilities { multifd: channels > 0, ..Capabilities::default() };
    let address: Address = "tcp:127.0.0.1:0".parse().expect("an address");
    let (from, to) = (Arc::clone(source) as Arc<dyn SourceVm>, Arc::clone(target) as Arc<dyn TargetVm>);
    let incoming =
        Incoming::listen(to, &address, params.clone(), capabilities, Arc::new(())).expect("a place");
    let migration = Migration::start(from, &incoming.address(), params, capabilities, Arc::new(()));
    let outcome = migration.expect("a start").wait();
    (outcome, incoming.wait())
}

#[test]
fn guest_with_requests_on_their_way_moves_with_its_device() {
    for channels in [0, 3] {
        let directory = TempDir::new().expect("a directory");
        let source = source(directory.path(), Fault::None);
        let target = target(directory.path(), "target", Fault::None, &source);

        let (outcome, arrival) = migrate(&source, &target, channels);

        assert!(matches!(outcome, Outcome::Completed), "{channels} channels: {outcome:?}, {arrival:?}");
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{channels} channels: {arrival:?}");
        target.wait(500);
        target.halt().expect("no wrong answer");
    }
}

#[test]
fn guest_whose_device_cannot_be_loaded_runs_on_and_moves_the_next_time() {
    for fault in [Fault::LoadDies, Fault::LoadFails] {
        let directory = TempDir::new().expect("a directory");
        let source = source(directory.path(), Fault::None);
        let bad = target(directory.path(), "bad", fault, &source);

        let (outcome, arrival) = migrate(&source, &bad, 2);

        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        let Arrival::Failed(error) = arrival else { panic!("{arrival:?}") };
        assert!(error.to_string().contains("fs0"), "{error}");
        source.wait(200);
        let good = target(directory.path(), "good", Fault::None, &source);
        let (outcome, _) = migrate(&source, &good, 2);
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        good.wait(200);
        good.halt().expect("no wrong answer");
    }
}

#[test]
fn guest_whose_device_cannot_be_saved_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let source = source(directory.path(), Fault::SaveFails);
    let target = target(directory.path(), "target", Fault::None, &source);

    let (outcome, _) = migrate(&source, &target, 2);

    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("fs0") && error.to_string().contains("saving"), "{error}");
    source.wait(200);
    source.halt().expect("no wrong answer");
}
