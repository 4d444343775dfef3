//! A fake VM, an engine that the test controls, and a monitor with both.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use sterna::ram::{Backing, Custody, CustodyClaim, DirtySource, GuestRam, RamBlock, dirty::SoftwareLog};
use sterna::{
    Address, Capabilities, Device, Event, Hook, IncomingStatistics, MigrationError, Observer, Parameters,
    RunState, SourceVm, StartError, Statistics, Status, TargetVm, Throttle, Vm, VmError,
};
use sterna_qmp::migration::{Engine, GuestAt, Outgoing, Receiving};
use sterna_qmp::{
    Announcing, BlockDevice, Client, ClientError, Endpoint, EventBus, MigrationControl, MonitoredVm, Server,
};

use super::dirty_rate::Ring;

/// Long enough for a busy host. No test waits until it has passed.
pub const LIMIT: Duration = Duration::from_secs(60);

pub struct FakeVm {
    ram: GuestRam,
    log: SoftwareLog,
    running: Mutex<bool>,
    has_guest: Mutex<bool>,
    pub quits: Mutex<u32>,
    /// Set for a VM with a dirty ring.
    pub throttle: OnceLock<Ring>,
    /// Called once, at the start of the next `cont`. `at_stop`: at the start of the next `stop`.
    pub at_cont: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    pub at_stop: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// The hooks of the VM, such as locks on disks.
    pub hooks: Mutex<Vec<Arc<dyn Hook>>>,
    /// The disks: file and length in bytes.
    pub disks: Mutex<Vec<(&'static str, u64)>>,
    announced: Mutex<Vec<String>>,
}

impl FakeVm {
    pub fn new(has_guest: bool, running: bool) -> Arc<Self> {
        let ram = GuestRam::new(vec![RamBlock::new("ram", 1 << 20, Backing::Memfd).unwrap()]).unwrap();
        let log = SoftwareLog::new(&ram);
        Arc::new(Self {
            ram,
            log,
            running: Mutex::new(running),
            has_guest: Mutex::new(has_guest),
            quits: Mutex::new(0),
            throttle: OnceLock::new(),
            at_cont: Mutex::default(),
            at_stop: Mutex::default(),
            hooks: Mutex::default(),
            disks: Mutex::default(),
            announced: Mutex::default(),
        })
    }

    pub fn set_running(&self, running: bool) {
        *self.running.lock().unwrap() = running;
    }

    /// Writes pages, as a guest would.
    pub fn write(&self, first: u64, count: u64) {
        self.log.mark_range(0, first, count);
    }

    /// The announcements since the last call: cards, id, and numbers.
    pub fn announced(&self) -> Vec<String> {
        std::mem::take(&mut *self.announced.lock().unwrap())
    }

    pub fn set_has_guest(&self) {
        *self.has_guest.lock().unwrap() = true;
    }
}

impl Vm for FakeVm {
    fn machine_type(&self) -> String {
        "sterna-test".into()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        Some(*b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff")
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.hooks.lock().unwrap().clone()
    }
}

impl SourceVm for FakeVm {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.log
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        self.throttle.get().map(|ring| ring as _)
    }
    fn run_state(&self) -> RunState {
        if *self.running.lock().unwrap() { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.set_running(false);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.set_running(true);
        Ok(())
    }
}

impl TargetVm for FakeVm {
    fn start(&self) -> Result<(), VmError> {
        self.set_has_guest();
        self.set_running(true);
        Ok(())
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.set_has_guest();
        Ok(())
    }
    fn reset(&self) {}
}

impl MonitoredVm for FakeVm {
    fn uses_kvm(&self) -> bool {
        self.throttle.get().is_some()
    }
    fn pause(&self) -> Result<(), VmError> {
        let first = self.at_stop.lock().unwrap().take();
        if let Some(first) = first {
            first();
        }
        self.set_running(false);
        Ok(())
    }
    fn cont(&self) -> Result<(), VmError> {
        let first = self.at_cont.lock().unwrap().take();
        if let Some(first) = first {
            first();
        }
        self.set_running(true);
        Ok(())
    }
    fn quit(&self) {
        *self.quits.lock().unwrap() += 1;
    }
    fn has_guest(&self) -> bool {
        *self.has_guest.lock().unwrap()
    }
    fn name(&self) -> String {
        "tern".into()
    }
    fn vcpu_threads(&self) -> Vec<i32> {
        vec![101, 102]
    }
    fn disks(&self) -> Vec<BlockDevice> {
        let device = |(file, len_bytes): &(&str, u64)| BlockDevice {
            file: (*file).to_owned(),
            format: "qcow2",
            len_bytes: *len_bytes,
            is_read_only: false,
            backing_file: Some("c.img".to_owned()),
        };
        self.disks.lock().unwrap().iter().map(device).collect()
    }
    fn resize_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmError> {
        self.disks.lock().unwrap()[index].1 = len_bytes;
        Ok(())
    }
    fn set_announcing(&self, announcing: Announcing) {
        let _ = self.announce(announcing, &[], "");
    }
    fn announce(&self, announcing: Announcing, cards: &[usize], id: &str) -> Result<(), VmError> {
        let Announcing { initial, max, rounds, step } = announcing;
        let [initial, max, step] = [initial, max, step].map(|time| time.as_millis());
        let said = format!("{cards:?} {id} {initial} ms, {max} ms, {rounds}, {step} ms");
        self.announced.lock().unwrap().push(said);
        Ok(())
    }
}

/// Stores its start parameters, and one migration in each direction.
#[derive(Default)]
pub struct FakeEngine {
    pub outgoing: Mutex<Option<Arc<FakeMigration>>>,
    pub incoming: Mutex<Option<Arc<FakeMigration>>>,
    /// Whether it refuses to start migrations in both directions.
    pub refuses: Mutex<bool>,
}

pub struct FakeMigration {
    expected: Mutex<Duration>,
    pub address: Address,
    pub parameters: Mutex<Parameters>,
    pub capabilities: Capabilities,
    observer: Arc<dyn Observer>,
    vm: Option<Arc<dyn TargetVm>>,
    status: Mutex<Status>,
    pub error: Mutex<Option<String>>,
    pub decided: Mutex<Option<GuestAt>>,
    /// The address at which a paused postcopy was resumed.
    pub goes_on_at: Mutex<Option<Address>>,
    /// Number of calls of `pause`.
    pub pauses: Mutex<u32>,
    pub autostart: Mutex<bool>,
    /// Whether the handover is under way, so that it is too late for `stop` and `cont`.
    pub is_handed_over: Mutex<bool>,
    /// Whether the guest could not be brought back after a failure.
    pub held: Mutex<bool>,
    /// The claim on the guest's custody, of an outgoing migration.
    custody: Option<CustodyClaim>,
    pub rdma: Mutex<Option<sterna::RdmaStatistics>>,
    pub incoming_rdma: Mutex<Option<sterna::IncomingRdmaStatistics>>,
    /// Connections that were replaced. `disconnected`: time since the present loss.
    pub reconnections: Mutex<Vec<sterna::Reconnection>>,
    pub disconnected: Mutex<Option<Duration>>,
}

impl FakeEngine {
    pub fn outgoing(&self) -> Arc<FakeMigration> {
        self.outgoing.lock().unwrap().clone().expect("an outgoing migration was started")
    }

    pub fn incoming(&self) -> Arc<FakeMigration> {
        self.incoming.lock().unwrap().clone().expect("an incoming migration was started")
    }
}

impl FakeMigration {
    /// Returns to the state before the first sync, without an expected downtime.
    pub fn forget_expectation(&self) {
        *self.expected.lock().unwrap() = Duration::ZERO;
    }

    /// Sets `status` and calls the observer, as the engine does.
    pub fn set(&self, status: Status) {
        if let Some(custody) = &self.custody {
            let custody_now = self.custody_in(status);
            custody.set(custody_now);
            if !custody_now.may_run() {
                // The engine also waits before it touches the guest.
                custody.wait_for_act();
            }
        }
        *self.status.lock().unwrap() = status;
        self.tell(&Event::Status(status));
    }

    pub fn tell(&self, event: &Event) {
        self.observer.event(event);
    }

    fn custody_in(&self, status: Status) -> Custody {
        match status {
            Status::Completed => Custody::Gone,
            Status::Undecided => Custody::Undecided,
            Status::Failed if *self.held.lock().unwrap() => Custody::Held,
            Status::Failed | Status::Cancelled => Custody::Free,
            Status::PreSwitchover | Status::Device => Custody::Leaving { is_free: false },
            _ => Custody::Leaving { is_free: true },
        }
    }
}

fn migration(
    (vm, custody): (Option<Arc<dyn TargetVm>>, Option<CustodyClaim>),
    address: &Address,
    parameters: Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Arc<FakeMigration> {
    Arc::new(FakeMigration {
        address: address.clone(),
        parameters: Mutex::new(parameters),
        capabilities,
        observer,
        vm,
        status: Mutex::new(Status::Setup),
        error: Mutex::default(),
        decided: Mutex::default(),
        goes_on_at: Mutex::default(),
        pauses: Mutex::default(),
        autostart: Mutex::new(true),
        is_handed_over: Mutex::default(),
        held: Mutex::default(),
        custody,
        expected: Mutex::new(Duration::from_millis(66)),
        rdma: Mutex::default(),
        incoming_rdma: Mutex::default(),
        reconnections: Mutex::default(),
        disconnected: Mutex::default(),
    })
}

impl Engine for FakeEngine {
    fn start_outgoing(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError> {
        if *self.refuses.lock().unwrap() {
            return Err(StartError::system(MigrationError::System("told to refuse".into(), None)));
        }
        let leaving = Custody::Leaving { is_free: true };
        let custody = vm.ram().claim_custody(leaving, Custody::may_leave).map_err(StartError::Guest)?;
        // Checks that no tracking is active and that no other owner has it.
        drop(vm.ram().claim_tracking().ok_or(StartError::Tracked)?);
        let migration = migration((None, Some(custody)), to, parameters, capabilities, observer);
        *self.outgoing.lock().unwrap() = Some(migration.clone());
        Ok(migration)
    }

    fn start_incoming(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, StartError> {
        if *self.refuses.lock().unwrap() {
            return Err(StartError::system(MigrationError::System("told to refuse".into(), None)));
        }
        let migration = migration((Some(vm), None), at, parameters, capabilities, observer);
        *self.incoming.lock().unwrap() = Some(migration.clone());
        Ok(migration)
    }
}

impl Outgoing for FakeMigration {
    fn status(&self) -> Status {
        *self.status.lock().unwrap()
    }
    fn statistics(&self) -> Statistics {
        Statistics {
            status: *self.status.lock().unwrap(),
            error: self.error.lock().unwrap().clone(),
            total_time: Duration::from_millis(1234),
            setup_time: Duration::from_millis(5),
            downtime: Some(Duration::from_millis(42)),
            expected_downtime: *self.expected.lock().unwrap(),
            switchover: vec![(sterna::SwitchoverStep::Stop, Duration::from_millis(1))],
            ram_total_bytes: 1 << 20,
            ram_remaining_bytes: 8192,
            transferred_bytes: 500_000,
            multifd_bytes: 400_000,
            precopy_bytes: 490_000,
            downtime_bytes: 10_000,
            postcopy_bytes: 0,
            postcopy_requests: 0,
            zero_pages: 100,
            normal_pages: 122,
            absent_pages: 50,
            free_pages: 0,
            missing_bytes: 0,
            bandwidth_bytes: 9_000_000_000,
            throughput_bytes: 1_000_000,
            drain_bytes: 1_000_000,
            dirty_pages_per_second: 77,
            pages_per_second: 244,
            rounds_begun: 3,
            rounds: Vec::new(),
            samples: Vec::new(),
            channels: 2,
            peer_is_sterna: Some(true),
            cpu_throttle_percent: 0,
            reconnections: self.reconnections.lock().unwrap().clone(),
            earlier_reconnections: Default::default(),
            disconnected: *self.disconnected.lock().unwrap(),
            postcopy: None,
            streams: Vec::new(),
            rdma: *self.rdma.lock().unwrap(),
            is_dirty_limited: false,
            dirty_limit_times: Some(sterna::DirtyLimitTimes {
                throttled_per_round: Duration::from_micros(1500),
                ring_full: Duration::from_millis(20),
            }),
        }
    }
    fn cancel(&self) -> Result<(), String> {
        if *self.status.lock().unwrap() == Status::Undecided {
            return Err("the handover is committed".into());
        }
        self.set(Status::Cancelling);
        self.set(Status::Cancelled);
        Ok(())
    }
    fn start_postcopy(&self) -> Result<(), String> {
        self.set(Status::PostcopyDevice);
        Ok(())
    }
    fn resume(&self, to: &Address) -> Result<(), String> {
        *self.goes_on_at.lock().unwrap() = Some(to.clone());
        Ok(())
    }
    fn pause(&self) -> Result<(), String> {
        *self.pauses.lock().unwrap() += 1;
        Ok(())
    }
    fn continue_switchover(&self) -> Result<(), String> {
        self.set(Status::Device);
        Ok(())
    }
    fn recording(&self) -> Option<sterna::Recording> {
        None
    }

    fn set_live(&self, parameters: &Parameters) {
        *self.parameters.lock().unwrap() = parameters.clone();
    }
    fn retry(&self) -> Result<(), String> {
        *self.held.lock().unwrap() = false;
        self.set(Status::Failed);
        self.tell(&Event::Resumed);
        Ok(())
    }
    fn decide(&self, guest_at: GuestAt, seen: Option<Status>) -> Result<(), String> {
        let now = Outgoing::status(self);
        if seen.is_some_and(|seen| seen != now) {
            return Err(format!("the state is {now:?}"));
        }
        *self.decided.lock().unwrap() = Some(guest_at);
        self.set(Status::Completed);
        Ok(())
    }
}

impl Receiving for FakeMigration {
    fn address(&self) -> Address {
        self.address.clone()
    }
    fn recover_at(&self, at: &Address) -> Result<(), String> {
        *self.goes_on_at.lock().unwrap() = Some(at.clone());
        Ok(())
    }
    fn pause(&self) -> Result<(), String> {
        *self.pauses.lock().unwrap() += 1;
        Ok(())
    }
    fn status(&self) -> Status {
        *self.status.lock().unwrap()
    }
    fn statistics(&self) -> IncomingStatistics {
        IncomingStatistics {
            status: *self.status.lock().unwrap(),
            error: self.error.lock().unwrap().clone(),
            received_bytes: 500_000,
            normal_pages: 122,
            zero_pages: 100,
            cleared_pages: 0,
            streams: Vec::new(),
            rdma: *self.incoming_rdma.lock().unwrap(),
            postcopy: None,
        }
    }
    fn cancel(&self, force: bool) -> Result<(), String> {
        if !force && *self.status.lock().unwrap() == Status::Held {
            return Err("by force only".into());
        }
        self.set(Status::Cancelled);
        Ok(())
    }
    fn set_autostart(&self, on: bool) -> bool {
        let mut autostart = self.autostart.lock().unwrap();
        if !*self.is_handed_over.lock().unwrap() {
            *autostart = on;
        }
        *autostart == on
    }
    fn release(&self) -> Result<(), String> {
        self.vm.as_ref().unwrap().start().map_err(|error| error.to_string())?;
        self.set(Status::Completed);
        self.tell(&Event::Resumed);
        Ok(())
    }
}

/// A VM with a monitor on a Unix socket.
pub struct Monitor {
    pub vm: Arc<FakeVm>,
    pub engine: Arc<FakeEngine>,
    pub bus: EventBus,
    pub control: Arc<MigrationControl>,
    pub server: Server,
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Monitor {
    /// A VM whose guest runs.
    pub fn running() -> Self {
        Self::of(FakeVm::new(true, true), true)
    }

    /// A VM that waits for a guest (`-incoming defer`).
    pub fn waiting(autostart: bool) -> Self {
        Self::of(FakeVm::new(false, false), autostart)
    }

    /// A monitor with Sterna's own engine.
    pub fn over_the_real_engine(vm: Arc<FakeVm>, autostart: bool) -> Self {
        Self::build(vm, |vm, _, bus| MigrationControl::new(vm, bus, autostart))
    }

    /// A monitor with the test's engine.
    pub fn over(engine: Arc<dyn Engine>, vm: Arc<FakeVm>, autostart: bool) -> Self {
        Self::build(vm, |vm, _, bus| MigrationControl::with_engine(vm, engine, bus, autostart))
    }

    pub fn of(vm: Arc<FakeVm>, autostart: bool) -> Self {
        Self::build(vm, |vm, engine, bus| MigrationControl::with_engine(vm, engine, bus, autostart))
    }

    fn build(
        vm: Arc<FakeVm>,
        control: impl FnOnce(Arc<FakeVm>, Arc<FakeEngine>, EventBus) -> Arc<MigrationControl>,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp.sock");
        let (bus, engine) = (EventBus::new(), Arc::new(FakeEngine::default()));
        let control = control(vm.clone(), engine.clone(), bus.clone());
        let server = Server::bind(&Endpoint::Unix(path.clone()), control.clone(), bus.clone()).unwrap();
        Self { vm, engine, bus, control, server, path, _directory: directory }
    }

    pub fn client(&self) -> Client {
        Client::connect(self.server.endpoint(), LIMIT).unwrap()
    }
}

/// Short forms of frequent requests in tests.
pub trait ClientExt {
    fn ok(&mut self, command: &str, arguments: Value) -> Value;
    fn refused(&mut self, command: &str, arguments: Value) -> String;
    fn event(&mut self, name: &str) -> Value;
    fn set(&mut self, name: &str, value: Value) -> Result<(), String>;
    fn capability(&mut self, name: &str, state: bool) -> Result<(), String>;
}

impl ClientExt for Client {
    fn ok(&mut self, command: &str, arguments: Value) -> Value {
        self.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    fn refused(&mut self, command: &str, arguments: Value) -> String {
        match self.execute(command, arguments.clone()) {
            Err(ClientError::Refused { desc, .. }) => desc,
            other => panic!("{command} {arguments} should be refused, got {other:?}"),
        }
    }

    fn event(&mut self, name: &str) -> Value {
        let event = self.next_event(LIMIT).unwrap().unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(event.name, name);
        event.data
    }

    fn set(&mut self, name: &str, value: Value) -> Result<(), String> {
        match self.execute("migrate-set-parameters", json!({ name: value })) {
            Ok(_) => Ok(()),
            Err(ClientError::Refused { desc, .. }) => Err(desc),
            Err(other) => panic!("{other}"),
        }
    }

    fn capability(&mut self, name: &str, state: bool) -> Result<(), String> {
        let change = json!({"capabilities": [{"capability": name, "state": state}]});
        match self.execute("migrate-set-capabilities", change) {
            Ok(_) => Ok(()),
            Err(ClientError::Refused { desc, .. }) => Err(desc),
            Err(other) => panic!("{other}"),
        }
    }
}
