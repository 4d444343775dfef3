//! Tests that migrate machines with virtio devices in other processes. The test itself drives the devices.
//! Their rings are in RAM that the guest does not use.
#![allow(clippy::print_stderr, missing_docs)]

use std::ops::Range;
use std::sync::Arc;

use crate::back_end::{BackEnd, Fault, VERSION_1};
use crate::common::{flat, guests, kvm_or_skip, wait_for};
use crate::model::Model;
use crate::virtqueue::{Part, Virtqueue};
use sterna::{
    Address, Arrival, Capabilities, DeviceStream, Incoming, Migration, Outcome, Parameters, RunState,
};
use sterna_vmm::{KvmMachine, MachineConfig, VhostUserOptions};

const STATE: usize = 2 << 20;
/// RAM that the guest does not use: the ring, a request, its answer.
const RING: u64 = 0x300_0000;
const REQUEST: u64 = RING + 0x1_0000;
const ANSWER: u64 = RING + 0x2_0000;
const ANSWER_BYTES: u32 = 5000 & !7;

/// A machine and the process of its device.
struct Host {
    machine: Arc<KvmMachine>,
    _back_end: BackEnd,
    _directory: tempfile::TempDir,
}

/// The state of the guest's driver.
struct Driver {
    queue: Virtqueue,
    model: Model,
}

fn host(incoming: bool, fault: Fault) -> Host {
    let directory = tempfile::tempdir().unwrap();
    let back_end = BackEnd::start(directory.path(), "socket", STATE, fault);
    let config = MachineConfig {
        guest: flat(&guests::counter()),
        incoming,
        vhost_user: vec![VhostUserOptions::new("vhost-user/0", back_end.socket())],
        ..MachineConfig::new("host")
    };
    Host { machine: KvmMachine::new(config).unwrap(), _back_end: back_end, _directory: directory }
}

fn running(fault: Fault) -> (Host, Driver) {
    let host = host(false, fault);
    let driver = Driver { queue: Virtqueue::new(RING, 4), model: Model::new(STATE) };
    host.machine.vhost_user()[0].start(VERSION_1, &[driver.queue.ring()]).unwrap();
    host.machine.resume().unwrap();
    wait_for("counting", || count(&host) > 1000);
    (host, driver)
}

fn count(host: &Host) -> u64 {
    host.machine.ram().block(0).read_u64(guests::COUNTERS).unwrap()
}

impl Driver {
    fn submit(&mut self, host: &Host, request: u64) {
        host.machine.ram().block(0).write(REQUEST, &request.to_le_bytes()).unwrap();
        let parts = [
            Part { address: REQUEST, len: 8, written: false },
            Part { address: ANSWER, len: ANSWER_BYTES, written: true },
        ];
        self.queue.submit(host.machine.ram(), &parts).unwrap();
    }

    fn expect(&mut self, host: &Host, request: u64) {
        let device = &host.machine.vhost_user()[0];
        self.queue.wait(host.machine.ram(), device, 0);
        let (mut expected, mut found) = (vec![0; ANSWER_BYTES as usize], vec![0; ANSWER_BYTES as usize]);
        self.model.serve(request, &mut expected);
        host.machine.ram().block(0).read(ANSWER, &mut found).unwrap();
        assert!(found == expected, "request {request} was answered by a device with another past");
    }

    fn serve(&mut self, host: &Host, requests: Range<u64>) {
        for request in requests {
            self.submit(host, request);
            self.expect(host, request);
        }
    }
}

fn migrate(source: &Host, target: &Host, channels: u8) -> (Outcome, Arrival) {
    let parameters = Parameters { multifd_channels: channels.max(1), ..Parameters::default() };
    let capabilities = Capabilities { multifd: channels > 0, ..Capabilities::default() };
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming =
        Incoming::listen(target.machine.clone(), &address, parameters.clone(), capabilities, Arc::new(()))
            .unwrap();
    let migration =
        Migration::start(source.machine.clone(), &incoming.address(), parameters, capabilities, Arc::new(()));
    (migration.unwrap().wait(), incoming.wait())
}

#[test]
fn virtio_device_of_a_machine_moves_with_it() {
    if !kvm_or_skip("virtio_device_of_a_machine_moves_with_it") {
        return;
    }
    for channels in [0, 3] {
        let (source, mut driver) = running(Fault::None);
        let target = host(true, Fault::None);
        driver.serve(&source, 0..20);

        let (outcome, arrival) = migrate(&source, &target, channels);

        assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        driver.serve(&target, 20..40);
        let arrived = count(&target);
        wait_for("counting on", || count(&target) > arrived + 1000);
    }
}

#[test]
fn virtio_device_that_fails_is_named_and_the_machine_runs_on_with_it() {
    if !kvm_or_skip("virtio_device_that_fails_is_named_and_the_machine_runs_on_with_it") {
        return;
    }
    for (at_source, at_target) in [(Fault::SaveFails, Fault::None), (Fault::None, Fault::LoadFails)] {
        let (source, mut driver) = running(at_source);
        let target = host(true, at_target);
        driver.serve(&source, 0..5);

        let (outcome, arrival) = migrate(&source, &target, 2);

        let told = format!("{outcome:?} {arrival:?}");
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{told}");
        assert!(matches!(arrival, Arrival::Failed(_)), "{told}");
        assert!(told.contains("vhost-user/0"), "{told}");
        driver.serve(&source, 5..10);
        let before = count(&source);
        wait_for("counting on", || count(&source) > before + 1000);
    }
}

#[test]
fn virtio_device_of_a_paused_machine_stands_still() {
    if !kvm_or_skip("virtio_device_of_a_paused_machine_stands_still") {
        return;
    }
    let (host, mut driver) = running(Fault::None);
    driver.serve(&host, 0..5);

    host.machine.pause();
    let device = Arc::clone(&host.machine.vhost_user()[0]);
    // The device has a configuration record only while its rings are stopped.
    device.configuration().unwrap();
    driver.submit(&host, 5);
    host.machine.cont().unwrap();

    assert!(device.configuration().is_err());
    driver.expect(&host, 5);
    driver.serve(&host, 6..10);
}
