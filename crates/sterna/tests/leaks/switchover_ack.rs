//! `switchover-ack`, in both protocol forms: the guest stops only when the destination's devices are ready.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{self, TestVm, case, vm, vms};
use sterna::{Capabilities, Device, Parameters, Status, VmError};
use sterna_transport::rdma::double::{Network, Settings};

/// A device that requires an acknowledgement.
struct Asking {
    instance: u32,
    ready: AtomicBool,
}

impl Device for Asking {
    fn name(&self) -> String {
        "asking".into()
    }
    fn instance(&self) -> u32 {
        self.instance
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(vec![7])
    }
    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        if body == [7] { Ok(()) } else { Err(VmError::new("load", "other bytes")) }
    }
    fn asks_switchover_ack(&self) -> bool {
        true
    }
    fn is_ready_for_switchover(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}

/// The transport of the migration.
#[derive(Debug, Clone, Copy)]
enum Over {
    Tcp,
    Rdma { lanes: bool },
}

const OVER: [Over; 3] = [Over::Tcp, Over::Rdma { lanes: false }, Over::Rdma { lanes: true }];

impl Over {
    fn settings(self) -> (Parameters, Capabilities) {
        let (mut params, mut capabilities) = common::multifd(2);
        capabilities.switchover_ack = true;
        if let Self::Rdma { lanes } = self {
            let host = Network::new(Settings::seeded(5)).unwrap().host(&[[10, 0, 0, 1].into()]);
            params.rdma.fabric = Some(Arc::new(host));
            capabilities.multifd = lanes;
        }
        (params, capabilities)
    }
}

fn add(vm: &TestVm, ready: bool) -> Vec<Arc<Asking>> {
    let devices: Vec<_> =
        (0..2).map(|instance| Arc::new(Asking { instance, ready: AtomicBool::new(ready) })).collect();
    devices.iter().for_each(|device| vm.guest.add_device(Arc::clone(device) as _));
    devices
}

fn on_each(machine: &'static str) -> impl Iterator<Item = (&'static str, Over)> {
    OVER.into_iter().map(move |over| (machine, over))
}

#[test]
fn devices_that_get_ready_late_hold_the_switchover_back() {
    for (machine, over) in ["pc-q35-11.0", "pc-q35-11.1"].into_iter().flat_map(on_each) {
        case(&format!("{machine} over {over:?}"), || {
            let (source, target) = vms();
            source.is_machine(machine);
            target.is_machine(machine);
            add(&source, false);
            let theirs = add(&target, false);
            let (params, capabilities) = over.settings();
            let incoming = vm::listen(&target, &params, capabilities);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            for device in &theirs {
                let rounds = migration.statistics().rounds_begun;
                support::eventually("rounds", || migration.statistics().rounds_begun > rounds + 2);
                assert_eq!(migration.status(), Status::Active, "it did not wait for every device");
                device.ready.store(true, Ordering::SeqCst);
            }
            common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        });
    }
}

#[test]
fn devices_that_are_ready_at_once_delay_nothing() {
    let machines = ["pc-q35-11.0", "pc-q35-11.1", "sterna-process"];
    for (machine, over) in machines.into_iter().flat_map(on_each) {
        case(&format!("{machine} over {over:?}"), || {
            let (source, target) = vms();
            source.is_machine(machine);
            target.is_machine(machine);
            add(&source, true);
            add(&target, true);
            let (params, capabilities) = over.settings();
            let incoming = vm::listen(&target, &params, capabilities);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        });
    }
}
