//! A guest moves to another machine of this host, and its memory stays in place.

mod failures;
mod planted;
mod processes;
mod refusals;
mod written;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use sterna::ram::{Custody, GuestRam, PAGE_SIZE};
use sterna::{
    Address, Arrival, Capabilities, Device, Incoming, Migration, MigrationMode, Outcome, Parameters, Vm,
    VmError,
};

use crate::common;
use crate::support::bank::{Bank, Calls};
use crate::support::{TestVm, small, vm, vms};
use sterna_guests::process::ProcessGuest;

/// The address of a Unix socket, for one test.
struct Place {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { path: directory.path().join("m"), _directory: directory }
    }

    fn address(&self) -> Address {
        Address::Unix(self.path.clone())
    }
}

fn parameters() -> Parameters {
    Parameters { mode: MigrationMode::CprTransfer, ..common::parameters() }
}

fn listen(target: &Arc<TestVm>, place: &Place, params: &Parameters, capabilities: Capabilities) -> Incoming {
    Incoming::listen(Arc::clone(target) as _, &place.address(), params.clone(), capabilities, Arc::new(()))
        .unwrap()
}

fn migrate(
    source: &Arc<TestVm>,
    target: &Arc<TestVm>,
    params: &Parameters,
    capabilities: Capabilities,
) -> Moved {
    let place = Place::new();
    let incoming = listen(target, &place, params, capabilities);
    let migration = vm::start(source, &incoming.address(), params, capabilities, Arc::new(()));
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    Moved { migration, incoming, outcome, arrival }
}

struct Moved {
    migration: Migration,
    incoming: Incoming,
    outcome: Outcome,
    arrival: Arrival,
}

impl Moved {
    /// Asserts that the guest is at the target, and that no page was copied.
    fn assert_arrived(&self, target: &TestVm) {
        common::assert_arrived(&self.outcome, &self.arrival, &target.guest);
        let (sent, came) = (self.migration.statistics(), self.incoming.statistics());
        assert_eq!((sent.normal_pages, sent.zero_pages), (0, 0));
        assert_eq!((came.normal_pages, came.zero_pages, came.cleared_pages), (0, 0, 0));
    }
}

/// Inodes of the memory's files.
fn inodes(ram: &GuestRam) -> Vec<u64> {
    let file = |block: &sterna::ram::RamBlock| block.shared_file().unwrap().file;
    ram.blocks().iter().map(|block| file(block).metadata().unwrap().ino()).collect()
}

/// Every byte of memory.
fn contents(ram: &GuestRam) -> Vec<Vec<u8>> {
    let read = |block: &sterna::ram::RamBlock| {
        let mut bytes = vec![0; block.len_bytes() as usize];
        block.read(0, &mut bytes).unwrap();
        bytes
    };
    ram.blocks().iter().map(read).collect()
}

/// A device that writes a page of the guest's memory when it is loaded.
struct Scribbler {
    ram: GuestRam,
}

impl Scribbler {
    /// Adds the device to both machines.
    fn on(machines: [&Arc<TestVm>; 2]) {
        for machine in machines {
            machine.guest.add_device(Arc::new(Self { ram: machine.ram() }));
        }
    }
}

impl Device for Scribbler {
    fn name(&self) -> String {
        "scribbler".to_owned()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(vec![1])
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        let written = self.ram.block(0).write(3 * PAGE_SIZE as u64, &[0xff; PAGE_SIZE]);
        written.map_err(|error| VmError::new("loading the scribbler", error))
    }
}

#[test]
fn running_guest_moves_and_no_page_is_copied() {
    let (source, target) = vms();
    let memory = inodes(&source.ram());
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());
    moved.assert_arrived(&target);

    assert_eq!(inodes(&target.ram()), memory, "the same memory");
    let left = inodes(&source.ram());
    assert!(left.iter().all(|inode| !memory.contains(inode)), "the source has none of it");
    assert_eq!(source.ram().custody(), Custody::Gone);
    assert!(contents(&source.ram()).iter().flatten().all(|byte| *byte == 0), "fresh memory is there instead");
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    for inode in memory {
        let mapped = mapped.lines().filter(|line| line.contains(&format!(" {inode} "))).count();
        assert_eq!(mapped, 1, "memory that is mapped once, by the target");
    }
}

#[test]
fn paused_guest_moves_and_stays_paused() {
    let (source, target) = vms();
    source.guest.pause().unwrap();
    let before = contents(&source.ram());
    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Completed), "{:?}", moved.outcome);
    assert_eq!(contents(&target.ram()), before);
    assert_eq!(*target.starts.lock().unwrap(), 0);
    target.guest.cont().expect("memory can be written");
    common::assert_lives_on(&target.guest);
}

#[test]
fn guest_moves_on_and_its_old_place_takes_another_by_copying() {
    let (source, target) = vms();
    migrate(&source, &target, &parameters(), Capabilities::default()).assert_arrived(&target);
    let third = TestVm::new(ProcessGuest::waiting(small()).unwrap());
    migrate(&target, &third, &parameters(), Capabilities::default()).assert_arrived(&third);

    // Pages that arrive at the first machine must not reach the memory that the third has.
    let (other, _) = vms();
    let fresh = TestVm::new(ProcessGuest::waiting_in(small(), source.ram()).unwrap());
    let incoming = vm::listen(&fresh, &common::parameters(), Capabilities::default());
    let migration =
        vm::start(&other, &incoming.address(), &common::parameters(), Capabilities::default(), Arc::new(()));
    common::assert_arrived(&migration.wait(), &incoming.wait(), &fresh.guest);
    common::assert_lives_on(&third.guest);
}

#[test]
fn streams_of_devices_move_on_the_main_channel_and_over_multifd() {
    let (params, multifd) = common::multifd(3);
    let over = [
        (parameters(), Capabilities::default()),
        (Parameters { multifd_channels: params.multifd_channels, ..parameters() }, multifd),
    ];
    for (params, capabilities) in over {
        let (saves, loads) = (Calls::default(), Calls::default());
        let banks: Vec<_> =
            (0..2).map(|index| Arc::new(Bank::new(index, 5, 3_000_000, 1 << 20, &saves))).collect();
        let waiting = banks.iter().map(|bank| Arc::new(bank.waiting(&loads))).collect();
        let (source, target) = common::pair(&small());
        let (source, target) = (TestVm::with_banks(source, banks), TestVm::with_banks(target, waiting));
        migrate(&source, &target, &params, capabilities).assert_arrived(&target);
        for bank in &target.banks {
            assert!(bank.runs());
        }
    }
}
