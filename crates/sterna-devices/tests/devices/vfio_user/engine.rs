//! Tests of a guest with four devices, one of which fails. For every fault in every state, the engine names
//! the device, and the guest continues at the source with the other three.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna::{
    Address, Arrival, Capabilities, Device, DeviceStream, Incoming, Migration, Outcome, Parameters, RunState,
    SourceVm, TargetVm, Vm, VmError,
};
use sterna_devices::statebank::{BankServer, Fault, FaultKind, StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio::{MigState, VfioDevice};
use sterna_devices::vfio_user::{Client, ClientOptions};
use sterna_ram::dirty::{DirtySource, SoftwareLog};
use sterna_ram::{Backing, GuestRam, RamBlock};

use super::faults::{SOURCE, TARGET};
use super::support::TIMEOUT;

/// Index of the device that fails.
const FAULTY: usize = 2;

/// A guest without vCPUs, and its devices' processes.
struct Guest {
    ram: GuestRam,
    log: SoftwareLog,
    devices: Vec<Arc<dyn Device>>,
    servers: Vec<BankServer>,
    runs: AtomicBool,
    _directory: tempfile::TempDir,
}

impl Guest {
    fn new(runs: bool, fault: Option<Fault>) -> Arc<Self> {
        let directory = tempfile::tempdir().unwrap();
        let hangs = fault.is_some_and(|fault| fault.kind == FaultKind::Hang);
        let (servers, devices) = (0..4)
            .map(|index| {
                let config = StateBankConfig {
                    name: format!("bank {index}"),
                    state_bytes: 2 << 20,
                    precopy_percent: 50,
                    seed: index as u64 + u64::from(runs) * 100,
                    fault: fault.filter(|_| index == FAULTY),
                    ..StateBankConfig::default()
                };
                let path = directory.path().join(index.to_string());
                let server = StateBank::new(config).unwrap().serve(&path).unwrap();
                // A long limit for the healthy devices, because they may be slow on a busy machine.
                let timeout = if hangs && index == FAULTY { TIMEOUT } else { Duration::from_secs(60) };
                let client = Client::connect(&path, &ClientOptions { timeout }).unwrap();
                let stream = Arc::new(VfioDevice::new(Arc::new(client)).unwrap());
                (server, Arc::new(Section { index, stream }) as Arc<dyn Device>)
            })
            .unzip();
        let ram = GuestRam::new(vec![RamBlock::new("ram", 1 << 20, Backing::Memfd).unwrap()]).unwrap();
        let log = SoftwareLog::new(&ram);
        Arc::new(Self { ram, log, devices, servers, runs: runs.into(), _directory: directory })
    }

    /// Checks that the guest continues. A device whose process died has no state to check.
    fn assert_runs_on(&self, fault: Fault, is_here: bool) {
        assert!(self.runs.load(Ordering::SeqCst), "{fault}");
        for (index, server) in self.servers.iter().enumerate() {
            if !(is_here && index == FAULTY && fault.kind != FaultKind::Fail) {
                assert_eq!(server.bank().status().state, MigState::Running, "{fault}: bank {index}");
            }
        }
    }
}

/// A device in the machine's list.
struct Section {
    index: usize,
    stream: Arc<VfioDevice<Arc<Client>>>,
}

impl Device for Section {
    fn name(&self) -> String {
        format!("bank/{}", self.index)
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn asks_switchover_ack(&self) -> bool {
        true
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(&self.stream) as _)
    }
}

impl Vm for Guest {
    fn machine_type(&self) -> String {
        "banks".into()
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
        &self.log
    }
    fn run_state(&self) -> RunState {
        if self.runs.load(Ordering::SeqCst) { RunState::Running } else { RunState::Paused }
    }
    fn stop(&self) -> Result<(), VmError> {
        self.runs.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
}

impl TargetVm for Guest {
    fn start(&self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn reset(&self) {}
}

/// Migrates with switchover acknowledgements. All state that can be read from running devices is then read. The downtime
/// limit is long: on a busy machine a device reads slowly, and nothing measures it again after its state is read.
fn migrate(source: &Arc<Guest>, target: &Arc<Guest>, multifd: bool) -> (Outcome, Arrival) {
    let downtime_limit = Duration::from_secs(600);
    let params = Parameters { multifd_channels: 2, downtime_limit, ..Parameters::default() };
    let capabilities =
        Capabilities { multifd, switchover_ack: true, return_path: true, ..Capabilities::default() };
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let (from, to) = (Arc::clone(source) as Arc<dyn SourceVm>, Arc::clone(target) as Arc<dyn TargetVm>);
    let incoming = Incoming::listen(to, &address, params.clone(), capabilities, Arc::new(())).unwrap();
    let migration = Migration::start(from, &incoming.address(), params, capabilities, Arc::new(())).unwrap();
    (migration.wait(), incoming.wait())
}

fn goes_wrong(fault: Fault, at_source: bool, multifd: bool) {
    let case =
        format!("{fault} at the {}, multifd {multifd}", if at_source { "source" } else { "destination" });
    let (source, target) = (
        Guest::new(true, Some(fault).filter(|_| at_source)),
        Guest::new(false, Some(fault).filter(|_| !at_source)),
    );

    let (outcome, arrival) = migrate(&source, &target, multifd);

    let Outcome::Failed { error, held: false } = &outcome else { panic!("{case}: {outcome:?} {arrival:?}") };
    let Arrival::Failed(reason) = &arrival else { panic!("{case}: {arrival:?}") };
    let text = if at_source { error.to_string() } else { reason.to_string() };
    assert!(text.contains(&format!("bank/{FAULTY}")), "{case}: {text}");
    source.assert_runs_on(fault, at_source);
    assert!(!target.runs.load(Ordering::SeqCst), "{case}");
    if at_source && fault.kind != FaultKind::Fail {
        return;
    }
    let next = if fault.kind == FaultKind::Fail { target } else { Guest::new(false, None) };
    let (outcome, arrival) = migrate(&source, &next, multifd);
    assert!(matches!(outcome, Outcome::Completed), "{case}, again: {outcome:?} {arrival:?}");
    for (moved, here) in source.servers.iter().zip(&next.servers) {
        assert_eq!(here.bank().status().loaded, Verdict::Good, "{case}, again");
        assert_eq!(moved.bank().status().digest, here.bank().status().digest, "{case}, again");
    }
}

/// Tests every state and byte with multifd channels. With the main channel alone, it tests the states of the
/// pause.
fn every_place(kind: FaultKind) {
    for (at_source, places) in [(true, SOURCE), (false, TARGET)] {
        for (state, byte, _) in places {
            let fault = Fault { kind, state: *state, byte: *byte };
            goes_wrong(fault, at_source, true);
            let is_read_running = *state == MigState::PreCopy && byte.is_some();
            if !is_read_running {
                goes_wrong(fault, at_source, false);
            }
        }
    }
}

#[test]
fn guest_runs_on_wherever_one_of_its_devices_fails() {
    every_place(FaultKind::Fail);
}

#[test]
fn guest_runs_on_wherever_one_of_its_devices_dies() {
    every_place(FaultKind::Die);
}

#[test]
fn guest_runs_on_wherever_one_of_its_devices_hangs() {
    every_place(FaultKind::Hang);
}

/// The estimate for devices' state must not depend on pages without content. Otherwise the estimate would
/// never fit the downtime limit.
#[test]
fn guest_without_content_moves_with_its_devices() {
    for multifd in [true, false] {
        for _ in 0..5 {
            let (source, target) = (Guest::new(true, None), Guest::new(false, None));

            let (outcome, arrival) = migrate(&source, &target, multifd);

            assert!(matches!(outcome, Outcome::Completed), "multifd {multifd}: {outcome:?} {arrival:?}");
        }
    }
}
