//! Ways in which a VMM owns its VM. docs/embedding.md shows parts of this file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::common;
use sterna::ram::{Custody, DirtySource, GuestRam, RamBlock};
use sterna::{Device, Migration, MigrationError, Outcome, RunState, SourceVm, Vm, VmError};
use sterna_guests::process::ProcessGuest;

/// The VMM's own VM: only one thread at a time may use it.
struct Machine {
    guest: Arc<ProcessGuest>,
    /// Panics when it is paused, after it has paused.
    is_broken: bool,
}

impl Machine {
    fn pause(&mut self) -> Result<(), VmError> {
        SourceVm::stop(&*self.guest)?;
        assert!(!std::mem::take(&mut self.is_broken), "told to panic");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        SourceVm::resume(&*self.guest)
    }
}

/// What the engine may use at any time, without the machine's owner: it has its own locks.
#[derive(Clone)]
struct Parts {
    guest: Arc<ProcessGuest>,
    ram: GuestRam,
}

impl Parts {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
}

/// Implements the callbacks that need only the parts.
macro_rules! of_parts {
    ($vm:ty) => {
        impl Vm for $vm {
            fn machine_type(&self) -> String {
                self.parts.guest.machine_type()
            }
            fn ram(&self) -> GuestRam {
                self.parts.ram.clone()
            }
            fn devices(&self) -> Vec<Arc<dyn Device>> {
                self.parts.guest.devices()
            }
            fn compatibility(&self) -> Option<Arc<dyn Device>> {
                self.parts.guest.compatibility()
            }
        }
    };
}

of_parts!(InSlot);
of_parts!(OnItsThread);
of_parts!(OneMigration);

/// A VM in a slot that many parts of the VMM share. The slot is empty after the VM was deleted.
struct InSlot {
    slot: Arc<Mutex<Option<Machine>>>,
    parts: Parts,
    runs: AtomicBool,
}

impl InSlot {
    fn with<T>(&self, act: impl FnOnce(&mut Machine) -> Result<T, VmError>) -> Result<T, VmError> {
        // After a panic the engine calls other callbacks, which must reach the machine.
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = slot.as_mut().ok_or_else(|| VmError::new("reach the VM", "it was deleted"))?;
        act(machine)
    }
}

impl SourceVm for InSlot {
    // Neither of these two takes the lock: the VMM may hold it while a vCPU waits for a page.
    fn dirty_source(&self) -> &dyn DirtySource {
        self.parts.dirty_source()
    }
    fn run_state(&self) -> RunState {
        if self.runs.load(Ordering::SeqCst) { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.with(Machine::pause)?;
        self.runs.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.with(Machine::resume)?;
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// A VM that lives on one thread. A callback sends its work there and waits for the result.
struct OnItsThread {
    calls: Sender<Call>,
    parts: Parts,
    runs: AtomicBool,
}

type Call = Box<dyn FnOnce(&mut Machine) + Send>;

impl OnItsThread {
    fn rendezvous(
        &self,
        act: impl FnOnce(&mut Machine) -> Result<(), VmError> + Send + 'static,
    ) -> Result<(), VmError> {
        let (answer, answered) = channel();
        let call: Call = Box::new(move |machine| drop(answer.send(act(machine))));
        // An event loop that sleeps in epoll is woken here, too: write to its eventfd.
        self.calls.send(call).map_err(|error| VmError::new("reach the VM's thread", error))?;
        // If the act panics on the VM's thread, its answer is dropped, and this is an error.
        answered.recv().map_err(|error| VmError::new("wait for the VM's thread", error))?
    }
}

impl SourceVm for OnItsThread {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.parts.dirty_source()
    }
    fn run_state(&self) -> RunState {
        if self.runs.load(Ordering::SeqCst) { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.rendezvous(Machine::pause)?;
        self.runs.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.rendezvous(Machine::resume)?;
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// The VM's thread: an event loop, of which this is the branch for calls.
fn event_loop(mut machine: Machine, calls: &Receiver<Call>) {
    while let Ok(call) = calls.recv() {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&mut machine)));
    }
}

/// A VM as one migration sees it, with a `GuestRam` of its own.
struct OneMigration {
    machine: Mutex<Machine>,
    parts: Parts,
}

/// The VMM's rule: one migration at a time, and none after the guest has left.
#[derive(Default)]
struct Exclusion(AtomicBool);

impl Exclusion {
    fn begin(&self, blocks: &[RamBlock]) -> Result<GuestRam, VmError> {
        if self.0.swap(true, Ordering::SeqCst) {
            return Err(VmError::new("migrate", "another migration runs, or the guest has left"));
        }
        // A new object knows no earlier migration: only this flag excludes a second one.
        GuestRam::new(blocks.to_vec()).map_err(|error| VmError::new("describe the memory", error))
    }

    fn ended(&self, outcome: &Outcome) {
        // After every other outcome the guest is elsewhere, or held for `Migration::retry`.
        let is_here = matches!(outcome, Outcome::Cancelled | Outcome::Failed { held: false, .. });
        self.0.store(!is_here, Ordering::SeqCst);
    }
}

impl SourceVm for OneMigration {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.parts.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.parts.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner).pause()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner).resume()
    }
}

fn machine(is_broken: bool) -> (Machine, Parts, Arc<ProcessGuest>) {
    let (source, target) = common::pair(&common::config());
    let parts = Parts { guest: Arc::clone(&source), ram: source.ram() };
    (Machine { guest: source, is_broken }, parts, target)
}

fn migrate(source: Arc<dyn SourceVm>, target: &Arc<ProcessGuest>) -> Outcome {
    let (params, capabilities) = common::multifd(2);
    let incoming = common::listen(target, &params, capabilities);
    let migration =
        Migration::start(source, &incoming.address(), params, capabilities, Arc::new(())).unwrap();
    let outcome = migration.wait();
    // The source knows its end first. The next migration needs a destination that is free again.
    let arrival = incoming.settle(Duration::ZERO);
    if matches!(outcome, Outcome::Completed) {
        common::assert_arrived(&outcome, &arrival, target);
    }
    outcome
}

fn in_slot(is_broken: bool) -> (Arc<InSlot>, Arc<ProcessGuest>) {
    let (machine, parts, target) = machine(is_broken);
    let slot = Arc::new(Mutex::new(Some(machine)));
    (Arc::new(InSlot { slot, parts, runs: AtomicBool::new(true) }), target)
}

fn on_its_thread(is_broken: bool) -> (Arc<OnItsThread>, Arc<ProcessGuest>) {
    let (machine, parts, target) = machine(is_broken);
    let (calls, received) = channel();
    std::thread::spawn(move || event_loop(machine, &received));
    (Arc::new(OnItsThread { calls, parts, runs: AtomicBool::new(true) }), target)
}

#[test]
fn vm_in_a_shared_slot_migrates_and_a_deleted_one_fails_with_its_error() {
    let (source, target) = in_slot(false);
    assert!(matches!(migrate(source, &target), Outcome::Completed));
    let (source, target) = in_slot(false);
    let slot = source.slot.lock().unwrap().take();
    let outcome = migrate(source, &target);
    assert!(
        matches!(&outcome, Outcome::Failed { error: MigrationError::Vm(error), .. } if error.why.contains("deleted")),
        "{outcome:?}"
    );
    drop(slot);
}

#[test]
fn vm_on_its_own_thread_migrates() {
    let (source, target) = on_its_thread(false);
    assert!(matches!(migrate(source, &target), Outcome::Completed));
}

#[test]
fn panic_that_poisons_the_vms_lock_is_an_error_and_the_guest_runs_again() {
    let (source, target) = in_slot(true);
    let outcome = migrate(source.clone(), &target);
    let Outcome::Failed { error: MigrationError::Panicked { callback, .. }, held: false } = &outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(callback, "SourceVm::stop");
    assert!(source.slot.is_poisoned());
    common::assert_lives_on(&source.parts.guest);
    assert!(matches!(migrate(source, &target), Outcome::Completed), "the next migration");
}

#[test]
fn panic_on_the_vms_thread_is_an_error_and_the_guest_runs_again() {
    let (source, target) = on_its_thread(true);
    let outcome = migrate(source.clone(), &target);
    assert!(matches!(outcome, Outcome::Failed { error: MigrationError::Vm(_), held: false }), "{outcome:?}");
    // `stop` returned an error, so by its contract the guest runs as before: this VMM has to see to that.
    source.resume().unwrap();
    common::assert_lives_on(&source.parts.guest);
    assert!(matches!(migrate(source, &target), Outcome::Completed), "the next migration");
}

#[test]
fn memory_object_for_each_migration_needs_the_vmms_own_exclusion() {
    let (machine, parts, target) = machine(true);
    let exclusion = Exclusion::default();
    let machine = Mutex::new(machine);
    let ram = exclusion.begin(parts.ram.blocks()).unwrap();
    assert!(exclusion.begin(parts.ram.blocks()).is_err(), "a second one");
    let parts = Parts { ram, ..parts };
    let source = Arc::new(OneMigration { machine, parts: parts.clone() });
    let outcome = migrate(source, &target);
    exclusion.ended(&outcome);
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    common::assert_lives_on(&parts.guest);

    let ram = exclusion.begin(parts.ram.blocks()).expect("the guest is here");
    assert_eq!(ram.custody(), Custody::Free);
    let machine = Mutex::new(Machine { guest: Arc::clone(&parts.guest), is_broken: false });
    let outcome = migrate(Arc::new(OneMigration { machine, parts: Parts { ram, ..parts.clone() } }), &target);
    exclusion.ended(&outcome);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(exclusion.begin(parts.ram.blocks()).is_err(), "the guest has left");
}
