//! Tests that move a guest to another machine on this host. Its devices' processes stay the same.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use sterna::{
    Address, Arrival, Capabilities, Device, Hook, HostDescriptors, Incoming, Migration, MigrationMode,
    Outcome, Parameters, RunState, StartError, Status, TargetVm, Vm, VmError,
};
use sterna_ram::GuestRam;
use sterna_vmm::{DeviceKind, KvmMachine, MachineConfig};

use super::host::{Driver, Host, fs, migrate};
use super::recorder::{
    GET_FEATURES, GET_VRING_BASE, Recorder, SET_DEVICE_STATE_FD, SET_LOG_BASE, SET_MEM_TABLE, SET_OWNER,
};
use crate::back_end::{Fault, SECTORS};
use crate::common::kvm_or_skip;
use crate::registers::{NEEDS_RESET, STATUS, wait_until};

/// Faults of the destination's machine.
#[derive(Default)]
struct Trouble {
    /// Its last hook fails, after everything was loaded.
    refuses: bool,
    /// The machine does not start, after its devices have started.
    does_not_start: bool,
    /// The machine sends requests to the back end before the commit, which the rule forbids.
    speaks: bool,
    /// Requests that the back end had received when the last hook was acquired.
    said: Option<(Recorder, Mutex<Vec<u32>>)>,
    /// Action on the back end when the last hook is acquired.
    at_the_end: Option<Box<dyn Fn() + Send + Sync>>,
}

struct Target(Arc<KvmMachine>, Arc<Trouble>);

impl Vm for Target {
    fn machine_type(&self) -> String {
        self.0.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.0.ram().clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.0.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        Some(self.0.compatibility())
    }
    fn shares_ram_with(&self) -> Option<String> {
        self.0.shares_ram_with()
    }
    fn cannot_follow(&self) -> Option<String> {
        self.0.cannot_follow()
    }
    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        let ours = self.0.host_descriptors();
        if !self.1.speaks {
            return ours;
        }
        ours.into_iter().map(|ours| Arc::new(Speaks(ours)) as Arc<dyn HostDescriptors>).collect()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        let mut hooks = self.0.hooks();
        hooks.push(Arc::clone(&self.1) as Arc<dyn Hook>);
        hooks
    }
}

impl TargetVm for Target {
    fn prepare_start(&self) -> Result<(), VmError> {
        if self.1.does_not_start {
            return Err(VmError::new("start", "it is told not to"));
        }
        self.0.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.0.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        TargetVm::take_over_paused(&*self.0)
    }
    fn reset(&self) {
        TargetVm::reset(&*self.0);
    }
}

impl Hook for Trouble {
    fn name(&self) -> String {
        "trouble".to_owned()
    }
    fn acquire(&self) -> Result<(), VmError> {
        if let Some((recorder, said)) = &self.said {
            *said.lock().unwrap() = recorder.said();
        }
        if let Some(act) = &self.at_the_end {
            act();
        }
        if self.refuses { Err(VmError::new("trouble", "it is told not to")) } else { Ok(()) }
    }
}

/// A destination that immediately asks the back end for its properties.
struct Speaks(Arc<dyn HostDescriptors>);

impl HostDescriptors for Speaks {
    fn name(&self) -> String {
        self.0.name()
    }
    fn give(&self) -> Result<Vec<OwnedFd>, VmError> {
        self.0.give()
    }
    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError> {
        let words = [GET_FEATURES, 1, 0].map(u32::to_ne_bytes).concat();
        rustix::io::write(&descriptors[0], &words).unwrap();
        self.0.take(descriptors)
    }
    fn let_go(&self) {
        self.0.let_go();
    }
}

fn parameters() -> Parameters {
    Parameters { mode: MigrationMode::CprTransfer, ..Parameters::default() }
}

/// A migration that has begun.
struct Move {
    migration: Result<Migration, StartError>,
    incoming: Incoming,
    _directory: tempfile::TempDir,
}

impl Move {
    fn begin(source: &Host, target: Arc<dyn TargetVm>, capabilities: Capabilities) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Unix(directory.path().join("m"));
        let incoming = Incoming::listen(target, &address, parameters(), capabilities, Arc::new(())).unwrap();
        let source = Arc::clone(&source.machine);
        let migration = Migration::start(source, &address, parameters(), capabilities, Arc::new(()));
        Self { migration, incoming, _directory: directory }
    }

    fn wait(self) -> (Outcome, Arrival) {
        (self.migration.unwrap().wait(), self.incoming.wait())
    }
}

fn move_to(source: &Host, target: Arc<dyn TargetVm>) -> (Outcome, Arrival) {
    Move::begin(source, target, Capabilities::default()).wait()
}

/// Checks that every request was answered once.
fn check_all(driver: &mut Driver, host: &Host, requests: std::ops::Range<u64>) {
    let queue = driver.requests;
    wait_until("answers", || {
        while driver.queues[queue].take(host.machine.ram()).is_some() {}
        driver.queues[queue].in_flight() == 0
    });
    requests.for_each(|request| driver.check(host, request));
    driver.registers.acknowledge(&host.machine, 1);
}

fn submit_all(driver: &mut Driver, host: &Host, requests: std::ops::Range<u64>) {
    requests.for_each(|request| driver.submit(host, request));
    driver.registers.notify(&host.machine, driver.requests as u32);
}

#[test]
fn guest_goes_on_in_another_process_with_the_same_back_end() {
    if !kvm_or_skip("guest_goes_on_in_another_process_with_the_same_back_end") {
        return;
    }
    let card = DeviceKind::Network { mac: Some([2; 6]) };
    for (kind, fault) in [
        (fs(), Fault::None),
        (fs(), Fault::Lingers),
        (DeviceKind::Block, Fault::Lingers),
        (card, Fault::None),
    ] {
        let (mut host, recorder) = Host::recorded(&kind, fault);
        let mut driver = Driver::new(0, &kind);
        driver.start(&host);
        driver.serve(&host, 0..3);
        for (hop, multifd) in [(0, false), (1, true)] {
            let first = 3 + hop * 10;
            // The back end has taken the requests and, because it lingers, has not returned them when the
            // guest stops.
            submit_all(&mut driver, &host, first..first + 4);
            let mut heir = Host::heir(std::slice::from_ref(&kind));
            let capabilities = Capabilities { multifd, ..Capabilities::default() };

            let (outcome, arrival) = Move::begin(&host, heir.machine.clone(), capabilities).wait();

            assert!(matches!(outcome, Outcome::Completed), "{kind:?} {fault:?}: {outcome:?} {arrival:?}");
            assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
            heir.inherit(&mut host);
            host = heir;
            check_all(&mut driver, &host, first..first + 4);
            driver.serve(&host, first + 4..first + 10);
        }
        // No unnecessary requests: the back end already has the memory and its own state.
        let count = |request| recorder.count(request);
        assert_eq!([GET_FEATURES, SET_OWNER, SET_MEM_TABLE].map(count), [3, 1, 1]);
        assert_eq!([SET_LOG_BASE, SET_DEVICE_STATE_FD].map(count), [0, 0]);
        if kind == DeviceKind::Block {
            // The configuration is read again, because a change may have been missed: each request makes this
            // disk longer.
            let sectors = || driver.registers.configuration(&host.machine, 8);
            wait_until("its length", || sectors() > (SECTORS + 3).to_le_bytes().to_vec());
        }
    }
}

#[test]
fn guest_that_stands_still_moves_with_its_back_end_and_goes_on_later() {
    if !kvm_or_skip("guest_that_stands_still_moves_with_its_back_end_and_goes_on_later") {
        return;
    }
    let (mut source, recorder) = Host::recorded(&fs(), Fault::None);
    let mut driver = Driver::new(0, &fs());
    driver.start(&source);
    driver.serve(&source, 0..3);
    submit_all(&mut driver, &source, 3..6);
    source.machine.pause();
    for _ in 0..2 {
        let mut heir = Host::heir(&[fs()]);
        let (outcome, arrival) = move_to(&source, heir.machine.clone());
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
        heir.inherit(&mut source);
        source = heir;
    }
    assert_eq!(recorder.count(GET_FEATURES), 3, "the back end knows each process");

    source.machine.cont().unwrap();

    check_all(&mut driver, &source, 3..6);
    driver.serve(&source, 6..20);
}

/// Requests that the back end received after `before`, until the destination's last hook was acquired.
fn heard_before_the_commit(trouble: &Trouble, before: usize) -> Vec<u32> {
    let (_, said) = trouble.said.as_ref().unwrap();
    said.lock().unwrap().get(before..).unwrap_or_default().to_vec()
}

fn listening(recorder: &Recorder) -> Trouble {
    Trouble { said: Some((recorder.clone(), Default::default())), ..Trouble::default() }
}

#[test]
fn failure_before_the_commit_leaves_the_guest_with_its_back_end() {
    if !kvm_or_skip("failure_before_the_commit_leaves_the_guest_with_its_back_end") {
        return;
    }
    for (kind, fault) in [(fs(), Fault::None), (DeviceKind::Block, Fault::Lingers)] {
        let (source, recorder) = Host::recorded(&kind, fault);
        let mut driver = Driver::new(0, &kind);
        driver.start(&source);
        driver.serve(&source, 0..3);
        let heir = Host::heir(std::slice::from_ref(&kind));
        for round in 0..3 {
            let first = 3 + round * 10;
            submit_all(&mut driver, &source, first..first + 4);
            let before = recorder.said().len();
            let trouble = Arc::new(Trouble { refuses: true, ..listening(&recorder) });
            let target = Arc::new(Target(heir.machine.clone(), Arc::clone(&trouble)));

            let (outcome, arrival) = move_to(&source, target);

            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?} {arrival:?}");
            // The requests are the source's, which stops its rings. The destination has sent none.
            let heard = heard_before_the_commit(&trouble, before);
            assert_eq!(heard, vec![GET_VRING_BASE; driver.queues.len()]);
            check_all(&mut driver, &source, first..first + 4);
            driver.serve(&source, first + 4..first + 10);
        }
        // A further attempt between the same two machines succeeds.
        let (outcome, arrival) = move_to(&source, heir.machine.clone());
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        driver.serve(&heir, 33..40);
    }
}

#[test]
fn destination_that_speaks_before_the_commit_is_found() {
    if !kvm_or_skip("destination_that_speaks_before_the_commit_is_found") {
        return;
    }
    let (source, recorder) = Host::recorded(&fs(), Fault::None);
    let mut driver = Driver::new(0, &fs());
    driver.start(&source);
    driver.serve(&source, 0..3);
    let heir = Host::heir(&[fs()]);
    let before = recorder.said().len();
    let trouble = Arc::new(Trouble { speaks: true, ..listening(&recorder) });

    let (outcome, arrival) = move_to(&source, Arc::new(Target(heir.machine.clone(), trouble)));

    // The source mistakes the destination's answer for its own, so the rings cannot be stopped.
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?} {arrival:?}");
    assert!(format!("{outcome:?}").contains("vhost-user/0"), "{outcome:?}");
    assert_eq!(recorder.said()[before], GET_FEATURES, "what the tests of failures look at finds it");
}

#[test]
fn cancelled_move_leaves_the_guest_and_its_next_move_elsewhere_carries_the_state() {
    if !kvm_or_skip("cancelled_move_leaves_the_guest_and_its_next_move_elsewhere_carries_the_state") {
        return;
    }
    let source = Host::running(&[(fs(), Fault::None)]);
    let mut driver = Driver::new(0, &fs());
    driver.start(&source);
    driver.serve(&source, 0..3);
    let heir = Host::heir(&[fs()]);
    let capabilities = Capabilities { pause_before_switchover: true, ..Capabilities::default() };
    let begun = Move::begin(&source, heir.machine.clone(), capabilities);
    let migration = begun.migration.as_ref().unwrap();
    wait_until("the source to wait", || migration.status() == Status::PreSwitchover);

    migration.cancel().unwrap();

    let (outcome, arrival) = begun.wait();
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?} {arrival:?}");
    driver.serve(&source, 3..10);
    let target = Host::new(true, &[(fs(), Fault::None)]).unwrap();
    let (outcome, arrival) = migrate(&source, &target);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
    driver.serve(&target, 10..20);
}

#[test]
fn guest_that_does_not_start_elsewhere_comes_back_to_its_back_end() {
    if !kvm_or_skip("guest_that_does_not_start_elsewhere_comes_back_to_its_back_end") {
        return;
    }
    let source = Host::running(&[(fs(), Fault::None), (DeviceKind::Block, Fault::Lingers)]);
    let mut drivers = [Driver::new(0, &fs()), Driver::new(1, &DeviceKind::Block)];
    for driver in &mut drivers {
        driver.start(&source);
        driver.serve(&source, 0..3);
        submit_all(driver, &source, 3..7);
    }
    let heir = Host::heir(&[fs(), DeviceKind::Block]);
    let trouble = Arc::new(Trouble { does_not_start: true, ..Trouble::default() });

    // The destination's devices run for a moment.
    let (outcome, arrival) = move_to(&source, Arc::new(Target(heir.machine.clone(), trouble)));

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?} {arrival:?}");
    for driver in &mut drivers {
        check_all(driver, &source, 3..7);
        driver.serve(&source, 7..20);
    }
}

#[test]
fn back_end_that_dies_is_named_and_the_guest_goes_on() {
    if !kvm_or_skip("back_end_that_dies_is_named_and_the_guest_goes_on") {
        return;
    }
    // While the source's guest runs, and when everything is loaded at the destination, right before the
    // commit.
    for at_the_end in [false, true] {
        let mut source = Host::running(&[(fs(), Fault::None), (fs(), Fault::None)]);
        let mut drivers = [Driver::new(0, &fs()), Driver::new(1, &fs())];
        for driver in &mut drivers {
            driver.start(&source);
            driver.serve(&source, 0..3);
        }
        let victim = Arc::new(Mutex::new(source.back_ends.remove(0)));
        let heir = Host::heir(&[fs(), fs()]);
        let kill = move || victim.lock().unwrap().kill();
        if !at_the_end {
            kill();
        }
        let act: Box<dyn Fn() + Send + Sync> = if at_the_end { Box::new(kill) } else { Box::new(|| ()) };
        let trouble = Arc::new(Trouble { at_the_end: Some(act), ..Trouble::default() });

        let begun =
            Move::begin(&source, Arc::new(Target(heir.machine.clone(), trouble)), Capabilities::default());
        let told = match &begun.migration {
            Err(error) => error.to_string(),
            Ok(migration) => format!("{:?} {:?}", migration.wait(), begun.incoming.status()),
        };

        // As with every device that does not run at the destination, the guest stays at the source, without
        // the device.
        assert!(told.contains("Failed"), "{told}");
        let _ = begun.incoming.cancel();
        let told = if at_the_end { format!("{:?}", begun.incoming.wait()) } else { told };
        assert!(told.contains("vhost-user/0") && told.contains("closed the connection"), "{told}");
        let [dead, alive] = &mut drivers;
        wait_until("the driver is told", || dead.registers.read(&source.machine, STATUS) & NEEDS_RESET != 0);
        alive.serve(&source, 3..20);
    }
}

#[test]
fn machines_that_do_not_fit_are_refused_by_name() {
    if !kvm_or_skip("machines_that_do_not_fit_are_refused_by_name") {
        return;
    }
    let tagged = |tag: &str| DeviceKind::FileSystem { tag: Some(tag.to_owned()) };
    let source = Host::running(&[(tagged("one"), Fault::None)]);
    let mut driver = Driver::new(0, &tagged("one"));
    driver.start(&source);
    driver.serve(&source, 0..3);
    let with_its_own = Host::new(true, &[(tagged("one"), Fault::None)]).unwrap();
    let cases = [
        (&with_its_own, "vhost-user device 0 has this machine's memory mapped and cannot follow it"),
        (
            &Host::heir(&[tagged("two")]),
            "its tag (vhost-user/0 (fs)): the source has one, this machine has two",
        ),
        (&Host::heir(&[DeviceKind::Block]), "its kind (vhost-user/0 (blk))"),
        (&Host::heir(&[]), "a device of kind 26"),
        (&Host::heir(&[tagged("one"), fs()]), "virtio device 1"),
    ];
    for (target, says) in cases {
        let (outcome, arrival) = move_to(&source, target.machine.clone());
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?} {arrival:?}");
        let told = format!("{outcome:?} {arrival:?}");
        assert!(told.contains(says), "{told}");
    }
    driver.serve(&source, 3..10);
    let other = MachineConfig {
        incoming: true,
        takes_over: true,
        vfio_user: vec!["/nobody/listens".into()],
        ..MachineConfig::new("host")
    };
    let why = KvmMachine::new(other).map(drop).unwrap_err().to_string();
    assert!(why.contains("vfio-user") && why.contains("cannot change to another VM process"), "{why}");
    // A machine that waits for memory as descriptors refuses a guest that arrives with pages.
    let heir = Host::heir(&[tagged("one")]);
    let (outcome, arrival) = migrate(&source, &heir);
    let told = format!("{outcome:?} {arrival:?}");
    assert!(told.contains("ExpectedHere"), "{told}");
    driver.serve(&source, 10..20);
}
