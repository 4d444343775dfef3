//! Tests that the machine boots, runs, stops and ends.
#![allow(clippy::print_stderr, missing_docs)]

use std::time::Duration;

use crate::common::{Console, flat, guests, kvm_or_skip, wait_for};
use sterna_vmm::{EndReason, GuestImage, KvmMachine, MachineConfig, VmmError};

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn boot_sector_prints_on_serial() {
    if !kvm_or_skip("boot_sector_prints_on_serial") {
        return;
    }
    let console = Console::default();
    let config = MachineConfig {
        guest: Some(GuestImage::BootSector(guests::boot_sector())),
        serial: Box::new(console.clone()),
        ..MachineConfig::new("boot")
    };
    let machine = KvmMachine::new(config).unwrap();

    machine.resume().unwrap();

    assert_eq!(machine.wait_ended(LIMIT), Some(EndReason::Exited(7)));
    assert_eq!(console.text(), "boot sector");
}

#[test]
fn flat_guest_stopped_counts_no_further_until_resumed() {
    if !kvm_or_skip("flat_guest_stopped_counts_no_further_until_resumed") {
        return;
    }
    let machine =
        KvmMachine::new(MachineConfig { guest: flat(&guests::counter()), ..MachineConfig::new("count") })
            .unwrap();
    let count = || machine.ram().block(0).read_u64(guests::COUNTERS).unwrap();

    machine.resume().unwrap();
    wait_for("counting", || count() > 1000);
    machine.stop();
    let stopped = count();
    std::thread::sleep(Duration::from_millis(20));
    let later = count();
    machine.resume().unwrap();
    wait_for("counting on", || count() > later + 1000);

    assert_eq!(stopped, later);
    assert_eq!(machine.ended(), None);
}

#[test]
fn guest_exit_port_ends_the_machine_and_cont_is_refused() {
    if !kvm_or_skip("guest_exit_port_ends_the_machine_and_cont_is_refused") {
        return;
    }
    let machine =
        KvmMachine::new(MachineConfig { guest: flat(&guests::exit_code()), ..MachineConfig::new("exit") })
            .unwrap();

    machine.resume().unwrap();

    assert_eq!(machine.wait_ended(LIMIT), Some(EndReason::Exited(3)));
    assert!(!machine.is_running());
    assert!(matches!(machine.resume(), Err(VmmError::State { .. })));
}

#[test]
fn triple_fault_stops_the_machine_with_its_reason() {
    if !kvm_or_skip("triple_fault_stops_the_machine_with_its_reason") {
        return;
    }
    let machine = KvmMachine::new(MachineConfig {
        guest: flat(&guests::triple_fault()),
        ..MachineConfig::new("fault")
    })
    .unwrap();

    machine.resume().unwrap();

    let reason = machine.wait_ended(LIMIT);
    assert!(matches!(reason, Some(EndReason::Shutdown { vcpu: 0, .. })), "{reason:?}");
}

#[test]
fn ram_around_the_hole_is_all_reachable() {
    if !kvm_or_skip("ram_around_the_hole_is_all_reachable") {
        return;
    }
    let config =
        MachineConfig { ram_bytes: 5 << 30, guest: flat(&guests::ram_probe()), ..MachineConfig::new("hole") };
    let machine = KvmMachine::new(config).unwrap();

    machine.resume().unwrap();

    assert_eq!(machine.wait_ended(LIMIT), Some(EndReason::Exited(1)));
    assert_eq!(machine.ram().block(1).len_bytes(), 2 << 30);
    assert_eq!(machine.ram().block(1).read_u64((2 << 30) - 8).unwrap(), (6 << 30) - 8);
    let resident: u64 = machine.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
    assert!(resident < 1 << 20, "{resident} bytes for a guest that touched two pages");
}

#[test]
fn eight_vcpus_all_run_and_all_stop() {
    if !kvm_or_skip("eight_vcpus_all_run_and_all_stop") {
        return;
    }
    let machine = KvmMachine::new(MachineConfig {
        vcpus: 8,
        guest: flat(&guests::counter()),
        ..MachineConfig::new("eight")
    })
    .unwrap();
    let counts = || {
        (0..8)
            .map(|i| machine.ram().block(0).read_u64(guests::COUNTERS + i * 4096).unwrap())
            .collect::<Vec<_>>()
    };

    machine.resume().unwrap();
    wait_for("all eight counting", || counts().iter().all(|count| *count > 100));
    machine.stop();
    let stopped = counts();
    std::thread::sleep(Duration::from_millis(10));

    assert_eq!(counts(), stopped);
}

#[test]
fn halted_guest_can_be_stopped() {
    if !kvm_or_skip("halted_guest_can_be_stopped") {
        return;
    }
    let machine = KvmMachine::new(MachineConfig {
        vcpus: 2,
        guest: flat(&guests::halted()),
        ..MachineConfig::new("halt")
    })
    .unwrap();

    for _ in 0..50 {
        machine.resume().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        machine.stop();
    }

    assert!(!machine.is_running());
    assert_eq!(machine.ended(), None);
}

#[test]
fn configuration_out_of_range_is_refused() {
    let refused = |change: fn(&mut MachineConfig)| {
        let mut config = MachineConfig { guest: flat(&guests::halted()), ..MachineConfig::new("bad") };
        change(&mut config);
        matches!(KvmMachine::new(config), Err(VmmError::Config { .. }))
    };

    assert!(refused(|config| config.vcpus = 0));
    assert!(refused(|config| config.vcpus = 9));
    assert!(refused(|config| config.ram_bytes = 1 << 20));
    assert!(refused(|config| config.guest = None));
    assert!(refused(|config| config.guest = Some(GuestImage::BootSector(vec![0; 513]))));
    assert!(refused(
        |config| config.guest = Some(GuestImage::Flat64 { code: vec![0x90], parameters: vec![0; 65] })
    ));
}
