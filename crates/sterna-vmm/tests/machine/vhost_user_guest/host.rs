//! Machines with devices in other processes, and the state of the guest's driver.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::recorder::Recorder;
use crate::back_end::{BackEnd, Fault};
use crate::model::Model;
use crate::registers::{Registers, VERSION_1, guest};
use crate::virtqueue::{Part, Virtqueue};
use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, StartError};
use sterna_vmm::{DeviceKind, KvmMachine, MachineConfig, VhostUserOptions, VmmError};

const STATE: usize = 1 << 20;
/// RAM that the guest does not use, for rings, requests and their answers.
pub const RINGS: u64 = 0x300_0000;
pub const RING_STEP: u64 = 0x1_0000;
const REQUESTS: u64 = 0x310_0000;
const ANSWERS: u64 = 0x320_0000;
const ANSWER_BYTES: u32 = 5000 & !7;
const ANSWER_STEP: u64 = 0x2000;
/// The feature bit VIRTIO_NET_F_MAC.
pub const MAC: u64 = 1 << 5;

pub fn fs() -> DeviceKind {
    DeviceKind::FileSystem { tag: None }
}

/// A machine and the processes of its devices.
pub struct Host {
    pub machine: Arc<KvmMachine>,
    pub back_ends: Vec<BackEnd>,
    directory: Option<tempfile::TempDir>,
}

impl Host {
    pub fn new(incoming: bool, devices: &[(DeviceKind, Fault)]) -> Result<Self, VmmError> {
        let base = MachineConfig { incoming, ..MachineConfig::new("host") };
        Self::behind(base, devices, |back_end, _| back_end.socket().to_owned())
    }

    /// Builds a machine with its back ends. `place` names the socket at which the front end finds a back end.
    fn behind(
        base: MachineConfig,
        devices: &[(DeviceKind, Fault)],
        mut place: impl FnMut(&BackEnd, &Path) -> PathBuf,
    ) -> Result<Self, VmmError> {
        let directory = tempfile::tempdir().unwrap();
        let started = devices.iter().enumerate().map(|(index, (_, fault))| {
            BackEnd::start(directory.path(), &format!("socket{index}"), STATE, *fault)
        });
        let back_ends: Vec<_> = started.collect();
        let sockets = back_ends.iter().map(|back_end| place(back_end, directory.path()));
        let kinds = devices.iter().map(|(kind, _)| kind.clone());
        let machine = KvmMachine::new(MachineConfig {
            guest: Some(guest()),
            vhost_user: options(kinds.zip(sockets)),
            ..base
        })?;
        Ok(Self { machine, back_ends, directory: Some(directory) })
    }

    pub fn running(devices: &[(DeviceKind, Fault)]) -> Self {
        let host = Self::new(false, devices).unwrap();
        host.machine.resume().unwrap();
        host
    }

    /// A running machine that uses dirty rings.
    pub fn running_on_rings(devices: &[(DeviceKind, Fault)]) -> Self {
        let base = MachineConfig { dirty_ring_size: Some(4096), ..MachineConfig::new("host") };
        let host = Self::behind(base, devices, |back_end, _| back_end.socket().to_owned()).unwrap();
        host.machine.resume().unwrap();
        host
    }

    /// A running machine whose front end's requests are recorded.
    pub fn recorded(kind: &DeviceKind, fault: Fault) -> (Self, Recorder) {
        let mut recorder = None;
        let host =
            Self::behind(MachineConfig::new("host"), &[(kind.clone(), fault)], |back_end, directory| {
                let (started, socket) = Recorder::before(back_end.socket(), directory);
                recorder = Some(started);
                socket
            });
        let host = host.unwrap();
        host.machine.resume().unwrap();
        (host, recorder.unwrap())
    }

    /// A machine that waits for the guest of another machine on this host. It has no processes, and its
    /// sockets do not exist.
    pub fn heir(kinds: &[DeviceKind]) -> Self {
        let nowhere = kinds.iter().map(|kind| (kind.clone(), PathBuf::from("/nobody/listens")));
        let machine = KvmMachine::new(MachineConfig {
            incoming: true,
            takes_over: true,
            vhost_user: options(nowhere),
            ..MachineConfig::new("host")
        });
        Self { machine: machine.unwrap(), back_ends: Vec::new(), directory: None }
    }

    /// Transfers the processes that served `other` to this machine, and ends the other machine.
    pub fn inherit(&mut self, other: &mut Self) {
        self.back_ends = std::mem::take(&mut other.back_ends);
        self.directory = other.directory.take();
        other.machine.quit();
    }
}

fn options(devices: impl Iterator<Item = (DeviceKind, PathBuf)>) -> Vec<VhostUserOptions> {
    let options = |(index, (kind, socket)): (usize, (DeviceKind, PathBuf))| VhostUserOptions {
        queues: kind.queues(1),
        kind: Some(kind),
        answer_limit: Duration::from_secs(5),
        ..VhostUserOptions::new(format!("vhost-user/{index}"), socket)
    };
    devices.enumerate().map(options).collect()
}

/// The state of the guest's driver for one device.
pub struct Driver {
    pub registers: Registers,
    features: u64,
    pub queues: Vec<Virtqueue>,
    /// Number of the queue that takes requests.
    pub requests: usize,
    model: Model,
}

impl Driver {
    pub fn new(slot: u64, kind: &DeviceKind) -> Self {
        let ring = |queue| Virtqueue::new(RINGS + (2 * slot + queue) * RING_STEP, 8);
        let queues: Vec<_> = (0..kind.queues(1) as u64).map(ring).collect();
        let requests = queues.len() - 1;
        // The back end does not offer MAC: only the front end knows the address.
        let features = VERSION_1 | if matches!(kind, DeviceKind::Network { .. }) { MAC } else { 0 };
        Self { registers: Registers::of(slot), features, queues, requests, model: Model::new(STATE) }
    }

    pub fn start(&mut self, host: &Host) {
        let rings: Vec<_> = self.queues.iter().map(Virtqueue::ring).collect();
        assert!(self.registers.agree(&host.machine, self.features));
        self.registers.start(&host.machine, &rings);
    }

    pub fn submit(&mut self, host: &Host, request: u64) {
        let at = request % 8;
        let slot = self.registers_slot();
        host.machine.ram().block(0).write(REQUESTS + slot + at * 8, &request.to_le_bytes()).unwrap();
        let parts = [
            Part { address: REQUESTS + slot + at * 8, len: 8, written: false },
            Part { address: ANSWERS + 16 * slot + at * ANSWER_STEP, len: ANSWER_BYTES, written: true },
        ];
        self.queues[self.requests].submit(host.machine.ram(), &parts).unwrap();
    }

    fn registers_slot(&self) -> u64 {
        (self.queues[0].ring().descriptors - RINGS) / RING_STEP / 2 * 0x1000
    }

    /// Checks the answer to a completed request.
    pub fn check(&mut self, host: &Host, request: u64) {
        let (mut expected, mut found) = (vec![0; ANSWER_BYTES as usize], vec![0; ANSWER_BYTES as usize]);
        self.model.serve(request, &mut expected);
        let at = ANSWERS + 16 * self.registers_slot() + request % 8 * ANSWER_STEP;
        host.machine.ram().block(0).read(at, &mut found).unwrap();
        assert!(found == expected, "request {request} was answered by a device with another past");
    }

    pub fn serve(&mut self, host: &Host, requests: std::ops::Range<u64>) {
        for request in requests {
            self.submit(host, request);
            let (queue, registers) = (self.requests, self.registers);
            registers.wait(&host.machine, &mut self.queues[queue], queue as u32);
            self.check(host, request);
        }
    }
}

pub fn start(source: &Host, target: &Host) -> (Result<Migration, StartError>, Incoming) {
    let plain = Parameters::default();
    start_with(source, target, [&plain, &plain], Capabilities::default())
}

/// Starts a migration with separate parameters for source and destination.
pub fn start_with(
    source: &Host,
    target: &Host,
    [ours, theirs]: [&Parameters; 2],
    capabilities: Capabilities,
) -> (Result<Migration, StartError>, Incoming) {
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let listening =
        Incoming::listen(target.machine.clone(), &address, theirs.clone(), capabilities, Arc::new(()));
    let incoming = listening.unwrap();
    let address = incoming.address();
    let migration =
        Migration::start(source.machine.clone(), &address, ours.clone(), capabilities, Arc::new(()));
    (migration, incoming)
}

pub fn migrate(source: &Host, target: &Host) -> (Outcome, Arrival) {
    let (migration, incoming) = start(source, target);
    (migration.unwrap().wait(), incoming.wait())
}
