//! Tests that migrate machines with devices in other processes. The devices check whether state and RAM
//! arrived.
#![allow(clippy::print_stderr, missing_docs)]

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::{flat, guests, kvm_or_skip, wait_for};
use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, RunState, SourceVm};
use sterna_devices::statebank::{BankServer, Fault, FaultKind, StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio::MigState;
use sterna_vmm::{Backing, KvmMachine, MachineConfig};

const STATE: u64 = 8 << 20;
/// RAM that the guest does not use: first address and length.
const WINDOW: (u64, u64) = (0x300_0000, 0x40_0000);

/// A machine and the processes of its devices.
struct Host {
    machine: Arc<KvmMachine>,
    banks: Vec<BankServer>,
    _directory: tempfile::TempDir,
}

fn host(incoming: bool, banks: Vec<StateBankConfig>) -> Host {
    let directory = tempfile::tempdir().unwrap();
    let path = |index: usize| directory.path().join(index.to_string());
    let serve = |(index, bank)| StateBank::new(bank).unwrap().serve(&path(index)).unwrap();
    let count = banks.len();
    let banks = banks.into_iter().enumerate().map(serve).collect();
    let config = MachineConfig {
        guest: flat(&guests::counter()),
        incoming,
        vfio_user: (0..count).map(path).collect(),
        ..MachineConfig::new("host")
    };
    Host { machine: KvmMachine::new(config).unwrap(), banks, _directory: directory }
}

fn writer(seed: u64) -> StateBankConfig {
    StateBankConfig {
        name: format!("bank {seed}"),
        state_bytes: STATE,
        precopy_percent: 50,
        dirty_rate: 4 << 20,
        dma_rate: 20_000,
        dma_window: Some(WINDOW),
        seed,
        ..StateBankConfig::default()
    }
}

fn waiting(fault: Option<Fault>) -> StateBankConfig {
    StateBankConfig { state_bytes: STATE, precopy_percent: 50, seed: 99, fault, ..StateBankConfig::default() }
}

fn multifd() -> (Parameters, Capabilities) {
    let parameters = Parameters { multifd_channels: 4, ..Parameters::default() };
    (parameters, Capabilities { multifd: true, ..Capabilities::default() })
}

fn migrate(source: &Host, target: &Host, settings: (Parameters, Capabilities)) -> (Outcome, Arrival) {
    let (parameters, capabilities) = settings;
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming =
        Incoming::listen(target.machine.clone(), &address, parameters.clone(), capabilities, Arc::new(()))
            .unwrap();
    let migration =
        Migration::start(source.machine.clone(), &incoming.address(), parameters, capabilities, Arc::new(()));
    (migration.unwrap().wait(), incoming.wait())
}

fn count(host: &Host) -> u64 {
    host.machine.ram().block(0).read_u64(guests::COUNTERS).unwrap()
}

fn begin(host: &Host) {
    host.machine.resume().unwrap();
    wait_for("counting", || count(host) > 1000);
    wait_for("writing", || host.banks.iter().all(|bank| bank.bank().status().dma_writes > 100));
}

#[test]
fn devices_of_a_machine_move_with_it_and_find_their_ram() {
    if !kvm_or_skip("devices_of_a_machine_move_with_it_and_find_their_ram") {
        return;
    }
    for settings in [multifd(), (Parameters::default(), Capabilities::default())] {
        let source = host(false, vec![writer(1), StateBankConfig { dma_rate: 0, ..writer(2) }]);
        let target = host(true, vec![waiting(None), waiting(None)]);
        source.machine.resume().unwrap();
        wait_for("counting", || count(&source) > 1000);
        wait_for("writing", || source.banks[0].bank().status().dma_writes > 100);

        let (outcome, arrival) = migrate(&source, &target, settings);

        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        let status: Vec<_> = target.banks.iter().map(|bank| bank.bank().status()).collect();
        assert_eq!(status.iter().map(|status| status.loaded).collect::<Vec<_>>(), [Verdict::Good; 2]);
        assert_eq!(status[0].ram, Verdict::Good, "the last writes before the stop did not arrive");
        assert!(source.banks.iter().all(|bank| bank.bank().status().state == MigState::Stop));
        let arrived = count(&target);
        wait_for("counting on", || count(&target) > arrived + 1000);
        let written = target.banks[0].bank().status().dma_writes;
        wait_for("writing on", || target.banks[0].bank().status().dma_writes > written + 100);
    }
}

#[test]
fn device_that_fails_is_named_and_the_machine_runs_on_with_it() {
    if !kvm_or_skip("device_that_fails_is_named_and_the_machine_runs_on_with_it") {
        return;
    }
    let faults = [
        (true, Fault::entering(FaultKind::Fail, MigState::PreCopyP2p)),
        (true, Fault::at_byte(FaultKind::Fail, MigState::StopCopy, 100_000)),
        (false, Fault::entering(FaultKind::Fail, MigState::Resuming)),
        (false, Fault::at_byte(FaultKind::Fail, MigState::Resuming, 1_000_000)),
    ];
    for (at_source, fault) in faults {
        let (here, there) = if at_source { (Some(fault), None) } else { (None, Some(fault)) };
        let source = host(false, vec![StateBankConfig { fault: here, ..writer(1) }]);
        let target = host(true, vec![waiting(there)]);
        begin(&source);

        let (outcome, arrival) = migrate(&source, &target, multifd());

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{fault}: {outcome:?}") };
        let Arrival::Failed(reason) = &arrival else { panic!("{fault}: {arrival:?}") };
        let text = if at_source { error.to_string() } else { reason.to_string() };
        assert!(text.contains("vfio-user/0") && text.contains("in state"), "{fault}: {text}");
        assert_eq!(SourceVm::run_state(&*source.machine), RunState::Running);
        assert_eq!(source.banks[0].bank().status().state, MigState::Running, "{fault}");
        let (outcome, arrival) = migrate(&source, &target, multifd());
        assert!(matches!(outcome, Outcome::Completed), "{fault}: {outcome:?}");
        assert!(matches!(arrival, Arrival::Completed(_)), "{fault}: {arrival:?}");
        assert_eq!(target.banks[0].bank().status().ram, Verdict::Good);
    }
}

#[test]
fn pause_stops_the_devices_and_cont_runs_them() {
    if !kvm_or_skip("pause_stops_the_devices_and_cont_runs_them") {
        return;
    }
    let (source, target) = (host(false, vec![writer(1)]), host(true, vec![waiting(None)]));
    begin(&source);

    source.machine.pause();
    let stopped = source.banks[0].bank().status();
    let (outcome, arrival) = migrate(&source, &target, multifd());

    assert_eq!(stopped.state, MigState::Stop);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    assert_eq!(target.banks[0].bank().status().digest, stopped.digest);
    target.machine.cont().unwrap();
    assert_eq!(target.banks[0].bank().status().state, MigState::Running);
    assert_eq!(target.banks[0].bank().status().ram, Verdict::Good);
    wait_for("writing on", || target.banks[0].bank().status().dma_writes > stopped.dma_writes + 100);
}

#[test]
fn cont_of_a_machine_that_runs_leaves_the_save_of_its_devices_alone() {
    if !kvm_or_skip("cont_of_a_machine_that_runs_leaves_the_save_of_its_devices_alone") {
        return;
    }
    let (source, target) = (host(false, vec![writer(1)]), host(true, vec![waiting(None)]));
    begin(&source);
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let (parameters, capabilities) = multifd();
    // So slow that the migration stays in the live phase.
    let slow = Parameters { max_bandwidth_bytes: 64 << 10, ..parameters.clone() };
    let incoming =
        Incoming::listen(target.machine.clone(), &address, parameters, capabilities, Arc::new(())).unwrap();
    let migration =
        Migration::start(source.machine.clone(), &incoming.address(), slow, capabilities, Arc::new(()));
    let migration = migration.unwrap();
    wait_for("saving", || source.banks[0].bank().status().state == MigState::PreCopy);

    source.machine.cont().unwrap();

    assert_eq!(source.banks[0].bank().status().state, MigState::PreCopy);
    migration.cancel().unwrap();
    assert!(matches!(migration.wait(), Outcome::Cancelled));
    drop(incoming.wait());
    assert_eq!(source.banks[0].bank().status().state, MigState::Running);
}

#[test]
fn device_that_cannot_be_had_is_refused_by_name() {
    if !kvm_or_skip("device_that_cannot_be_had_is_refused_by_name") {
        return;
    }
    let nobody = MachineConfig {
        guest: flat(&guests::counter()),
        vfio_user: vec![PathBuf::from("/nonexistent/socket")],
        ..MachineConfig::new("host")
    };
    let error = KvmMachine::new(nobody).unwrap_err().to_string();
    assert!(error.contains("vfio-user") && error.contains("/nonexistent/socket"), "{error}");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bank");
    let _server = StateBank::new(waiting(None)).unwrap().serve(&path).unwrap();
    let private = MachineConfig {
        guest: flat(&guests::counter()),
        backing: Backing::Anonymous,
        vfio_user: vec![path],
        ..MachineConfig::new("host")
    };
    let error = KvmMachine::new(private).unwrap_err().to_string();
    assert!(error.contains("private memory"), "{error}");
}
