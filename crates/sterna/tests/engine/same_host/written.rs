//! Running devices of the destination may write memory with which the source would continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use sterna::ram::{Custody, GuestRam, PAGE_SIZE};
use sterna::{
    Arrival, Capabilities, Device, DeviceStream, Outcome, RemainingState, RunState, SourceVm, Status, Vm,
    VmError,
};

use super::{Place, listen, migrate, parameters};
use crate::common;
use crate::support::vm::order;
use crate::support::{TestVm, eventually, vm, vm_error, vms};

/// A device whose DMA continues on the side where the device runs.
struct Dma {
    ram: GuestRam,
    /// The byte with which it fills page 3.
    writes: Option<u8>,
    runs: AtomicU32,
    /// Whether its process has ended.
    is_gone: AtomicBool,
}

impl Dma {
    /// Adds such a device to each side. Returns the destination's.
    fn on(machines: (&Arc<TestVm>, &Arc<TestVm>), writes: Option<u8>) -> Arc<Self> {
        Self::named("dma", machines, writes)
    }

    fn named(
        name: &'static str,
        (source, target): (&Arc<TestVm>, &Arc<TestVm>),
        writes: Option<u8>,
    ) -> Arc<Self> {
        let [_, theirs] = [(source, None), (target, writes)].map(|(machine, writes)| {
            let dma = Arc::new(Self {
                ram: machine.ram(),
                writes,
                runs: AtomicU32::new(0),
                is_gone: AtomicBool::new(false),
            });
            machine.guest.add_device(Arc::new(DmaDevice(name, Arc::clone(&dma))));
            dma
        });
        theirs
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }
}

struct DmaDevice(&'static str, Arc<Dma>);

impl Device for DmaDevice {
    fn name(&self) -> String {
        self.0.to_owned()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(&self.1) as _)
    }
}

impl DeviceStream for Dma {
    fn begin_save(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn remaining(&self) -> Result<RemainingState, VmError> {
        Ok(RemainingState::default())
    }
    fn read(&self, _: &mut [u8]) -> Result<usize, VmError> {
        Ok(0)
    }
    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn end_save(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn begin_load(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn write(&self, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn finish_load(&self, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn end_load(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn check_run(&self) -> Result<(), VmError> {
        if self.is_gone.load(Ordering::SeqCst) { Err(VmError::new("DMA", "it is gone")) } else { Ok(()) }
    }
    fn run(&self) -> Result<(), VmError> {
        self.check_run()?;
        self.runs.fetch_add(1, Ordering::SeqCst);
        if let Some(byte) = self.writes {
            let written = self.ram.block(0).write(3 * PAGE_SIZE as u64, &[byte; PAGE_SIZE]);
            written.map_err(|error| VmError::new("DMA", error))?;
        }
        Ok(())
    }
}

#[test]
fn start_that_is_known_to_fail_lets_no_device_write_the_sources_memory() {
    let (source, target) = vms();
    let dma = Dma::on((&source, &target), Some(0xff));
    order(&target.fail_start, true);

    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    assert!(matches!(moved.arrival, Arrival::Failed(_)), "{:?}", moved.arrival);
    assert_eq!(dma.runs(), 0);
    common::assert_lives_on(&source.guest);
}

#[test]
fn device_that_is_gone_when_devices_are_to_run_lets_no_other_one_write() {
    let (source, target) = vms();
    let dma = Dma::on((&source, &target), Some(0xff));
    let other = Dma::named("other", (&source, &target), None);
    other.is_gone.store(true, Ordering::SeqCst);

    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    let Arrival::Failed(why) = moved.arrival else { panic!("{:?}", moved.arrival) };
    assert_eq!(vm_error(&why).why, "it is gone");
    assert_eq!((dma.runs(), other.runs()), (0, 0));
    common::assert_lives_on(&source.guest);
}

#[test]
fn start_that_fails_after_devices_ran_is_final_and_may_be_tried_again() {
    let (source, target) = vms();
    let dma = Dma::on((&source, &target), None);
    order(&target.fail_start_late, true);
    let place = Place::new();
    let incoming = listen(&target, &place, &parameters(), Capabilities::default());
    let to = incoming.address();

    let migration = vm::start(&source, &to, &parameters(), Capabilities::default(), Arc::new(()));

    assert!(matches!(migration.wait(), Outcome::Completed), "it lets go of the memory");
    assert_eq!((source.ram().custody(), source.run_state()), (Custody::Gone, RunState::Paused));
    eventually("held", || incoming.status() == Status::Held);
    assert!(incoming.cancel().is_err(), "it is the only copy");
    assert!(!target.ram().custody().may_run());
    incoming.release().expect("held");
    eventually("held again", || dma.runs() == 2 && incoming.status() == Status::Held);

    order(&target.fail_start_late, false);
    incoming.release().expect("held");
    let arrival = incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    common::assert_lives_on(&target.guest);
}

/// Memory that an operator discards is lost: the source has released it, because it was written.
#[test]
fn guest_that_is_held_and_discarded_does_not_come_back_to_the_source() {
    let (source, target) = vms();
    let _dma = Dma::on((&source, &target), Some(0xff));
    order(&target.fail_start_late, true);
    let place = Place::new();
    let incoming = listen(&target, &place, &parameters(), Capabilities::default());
    let to = incoming.address();
    let migration = vm::start(&source, &to, &parameters(), Capabilities::default(), Arc::new(()));
    eventually("held", || incoming.status() == Status::Held);

    incoming.discard().expect("held");

    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    assert!(matches!(migration.wait(), Outcome::Completed));
    assert_eq!(source.ram().custody(), Custody::Gone);
}

/// Without such a device, memory is not written before the guest runs.
#[test]
fn start_that_fails_late_without_such_a_device_gives_the_guest_back() {
    let (source, target) = vms();
    order(&target.fail_start_late, true);

    let moved = migrate(&source, &target, &parameters(), Capabilities::default());

    assert!(matches!(moved.outcome, Outcome::Failed { held: false, .. }), "{:?}", moved.outcome);
    common::assert_lives_on(&source.guest);
}

/// Each side has its own memory, so the source's is unchanged.
#[test]
fn start_that_fails_after_devices_ran_in_copied_memory_gives_the_guest_back() {
    let (source, target) = vms();
    let dma = Dma::on((&source, &target), Some(0xff));
    order(&target.fail_start_late, true);
    let incoming = vm::listen(&target, &common::parameters(), Capabilities::default());
    let to = incoming.address();

    let migration = vm::start(&source, &to, &common::parameters(), Capabilities::default(), Arc::new(()));

    assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
    assert_eq!(dma.runs(), 1);
    common::assert_lives_on(&source.guest);
}
