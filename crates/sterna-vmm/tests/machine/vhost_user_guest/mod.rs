//! Tests of virtio devices in other processes. The guest's driver uses them while the engine migrates the
//! machine.
#![allow(missing_docs)]

mod host;
mod recorder;
mod same_host;

use std::sync::Arc;

use crate::back_end::{BLOCK_QUEUES, BLOCK_SIZE, Fault, LINGERS, SECTORS};
use crate::certificates;
use crate::common::kvm_or_skip;
use crate::registers::{
    DEVICE_ID, GENERATION, INTERRUPT_STATUS, MAGIC, NEEDS_RESET, QUEUE_NUM_MAX, STATUS, VERSION_1, wait_until,
};
use crate::virtqueue::Virtqueue;
use host::{Driver, Host, MAC, RING_STEP, RINGS, fs, migrate, start, start_with};
use sterna::{
    Arrival, Capabilities, Compression, Outcome, Parameters, RunState, Tls, TlsCredentials, TlsEndpoint,
    ZeroPageDetection,
};
use sterna_vmm::{DeviceKind, KvmMachine, MachineConfig};

#[test]
fn driver_finds_a_device_of_another_process_and_its_requests_go_through() {
    if !kvm_or_skip("driver_finds_a_device_of_another_process_and_its_requests_go_through") {
        return;
    }
    let card = DeviceKind::Network { mac: Some(*b"\x02mac01") };
    for (kind, id) in [(fs(), 26), (DeviceKind::Block, 2), (card, 1)] {
        let host = Host::running(&[(kind.clone(), Fault::None)]);
        let machine = &host.machine;
        let mut driver = Driver::new(0, &kind);
        let registers = driver.registers;

        assert_eq!(registers.read(machine, MAGIC), u32::from_le_bytes(*b"virt"));
        assert_eq!(registers.read(machine, DEVICE_ID), id);
        assert_eq!(registers.read(machine, QUEUE_NUM_MAX), 256);
        let space = registers.configuration(machine, 40);
        match kind {
            DeviceKind::Block => {
                assert_eq!(space[..8], SECTORS.to_le_bytes());
                // The number of queues is the machine's, not the back end's.
                assert_eq!(space[34..36], [1, 0]);
            }
            DeviceKind::Network { .. } => assert_eq!(&space[..8], b"\x02mac01\0\0"),
            _ => assert_eq!((&space[..6], &space[36..]), (&b"model\0"[..], &[1, 0, 0, 0][..])),
        }
        let of_kind = match kind {
            DeviceKind::Block => BLOCK_SIZE | BLOCK_QUEUES,
            // The bit of a disk's feature has another meaning for a network card.
            DeviceKind::Network { .. } => MAC | BLOCK_QUEUES,
            _ => 0,
        };
        assert_eq!(registers.features(machine), VERSION_1 | of_kind);
        assert!(!registers.agree(machine, VERSION_1 | 1 << 26), "the log is no feature for drivers");
        assert!(!registers.agree(machine, 0));

        driver.start(&host);
        driver.serve(&host, 0..20);
        // A driver that resets the device finds a new device with new rings.
        registers.write(machine, STATUS, 0);
        assert_eq!(registers.read(machine, STATUS), 0);
        assert_eq!(registers.read(machine, INTERRUPT_STATUS), 0);
        machine.ram().block(0).write(RINGS, &vec![0; 2 * RING_STEP as usize]).unwrap();
        driver = Driver::new(0, &kind);
        driver.start(&host);
        driver.serve(&host, 0..20);
    }
}

#[test]
fn guest_moves_with_requests_in_flight_and_its_rings_go_on_where_they_were() {
    if !kvm_or_skip("guest_moves_with_requests_in_flight_and_its_rings_go_on_where_they_were") {
        return;
    }
    let card = DeviceKind::Network { mac: Some([2; 6]) };
    for (kind, fault, there) in [
        (fs(), Fault::None, Fault::None),
        (fs(), Fault::Lingers, Fault::None),
        (DeviceKind::Block, Fault::Lingers, Fault::None),
        (card.clone(), Fault::None, Fault::OffersAddress),
        (card, Fault::OffersAddress, Fault::None),
    ] {
        let source = Host::running(&[(kind.clone(), fault)]);
        let target = Host::new(true, &[(kind.clone(), there)]).unwrap();
        let mut driver = Driver::new(0, &kind);
        driver.start(&source);
        driver.serve(&source, 0..3);
        // The back end has taken the requests and, because it lingers, has not returned them when the guest
        // stops.
        for request in 3..7 {
            driver.submit(&source, request);
        }
        driver.registers.notify(&source.machine, driver.requests as u32);
        if kind == DeviceKind::Block {
            // Waits until the back end has reported the change of the disk's length: each request makes the
            // disk longer.
            std::thread::sleep(LINGERS);
        }

        let (outcome, arrival) = migrate(&source, &target);

        assert!(matches!(outcome, Outcome::Completed), "{kind:?} {fault:?}: {outcome:?} {arrival:?}");
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        let queue = driver.requests;
        wait_until("answers", || {
            while driver.queues[queue].take(target.machine.ram()).is_some() {}
            driver.queues[queue].in_flight() == 0
        });
        (3..7).for_each(|request| driver.check(&target, request));
        driver.registers.acknowledge(&target.machine, 1);
        driver.serve(&target, 7..20);
    }
}

#[test]
fn device_moves_with_compressed_pages_over_tls() {
    if !kvm_or_skip("device_moves_with_compressed_pages_over_tls") {
        return;
    }
    let certificates = certificates::good_directory();
    for (multifd_compression, zero_page_detection, slower) in [
        (
            Compression::Zstd,
            ZeroPageDetection::Multifd,
            Capabilities { auto_converge: true, ..Default::default() },
        ),
        (
            Compression::Zlib,
            ZeroPageDetection::Legacy,
            Capabilities { dirty_limit: true, ..Default::default() },
        ),
    ] {
        let devices = [(fs(), Fault::Lingers)];
        // A dirty limit needs dirty rings.
        let source = match slower.dirty_limit {
            true => Host::running_on_rings(&devices),
            false => Host::running(&devices),
        };
        let target = Host::new(true, &[(fs(), Fault::None)]).unwrap();
        let mut driver = Driver::new(0, &fs());
        driver.start(&source);
        driver.serve(&source, 0..3);
        let capabilities = Capabilities { multifd: true, switchover_ack: true, ..slower };
        let [ours, theirs] = [TlsEndpoint::Client, TlsEndpoint::Server].map(|endpoint| {
            let credentials = TlsCredentials::from_directory(certificates.path(), endpoint, false).unwrap();
            Parameters {
                multifd_compression,
                zero_page_detection,
                tls: Some(Tls::new(Arc::new(credentials))),
                ..Parameters::default()
            }
        });

        let (migration, incoming) = start_with(&source, &target, [&ours, &theirs], capabilities);
        let ends = (migration.unwrap().wait(), incoming.wait());

        assert!(matches!(ends, (Outcome::Completed, Arrival::Completed(RunState::Running))), "{ends:?}");
        driver.serve(&target, 3..20);
    }
}

#[test]
fn guest_whose_device_cannot_be_loaded_elsewhere_goes_on_with_it_here() {
    if !kvm_or_skip("guest_whose_device_cannot_be_loaded_elsewhere_goes_on_with_it_here") {
        return;
    }
    let source = Host::running(&[(fs(), Fault::Lingers)]);
    let mut driver = Driver::new(0, &fs());
    driver.start(&source);
    driver.serve(&source, 0..2);
    for request in 2..5 {
        driver.submit(&source, request);
    }
    driver.registers.notify(&source.machine, 1);
    let target = Host::new(true, &[(fs(), Fault::LoadFails)]).unwrap();

    let (outcome, arrival) = migrate(&source, &target);

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert!(format!("{outcome:?} {arrival:?}").contains("vhost-user/0"), "{outcome:?} {arrival:?}");
    wait_until("answers", || {
        while driver.queues[1].take(source.machine.ram()).is_some() {}
        driver.queues[1].in_flight() == 0
    });
    (2..5).for_each(|request| driver.check(&source, request));
    driver.serve(&source, 5..8);
    // Another destination takes the guest.
    let target = Host::new(true, &[(fs(), Fault::None)]).unwrap();
    let (outcome, arrival) = migrate(&source, &target);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?} {arrival:?}");
    driver.serve(&target, 8..20);
}

#[test]
fn rings_outside_of_ram_end_in_a_device_that_needs_a_reset() {
    if !kvm_or_skip("rings_outside_of_ram_end_in_a_device_that_needs_a_reset") {
        return;
    }
    let host = Host::running(&[(fs(), Fault::None)]);
    let mut driver = Driver::new(0, &fs());
    let good: Vec<_> = driver.queues.iter().map(Virtqueue::ring).collect();
    let bad = [
        sterna_devices::vhost_user::Ring { used: 1 << 40, ..good[1] },
        sterna_devices::vhost_user::Ring { descriptors: 0xd000_0000, ..good[1] },
        // The last byte of the ring is outside RAM.
        sterna_devices::vhost_user::Ring { available: (64 << 20) - 8, ..good[1] },
    ];
    for ring in bad {
        assert!(driver.registers.agree(&host.machine, VERSION_1));
        driver.registers.start(&host.machine, &[good[0], ring]);
        let status = || driver.registers.read(&host.machine, STATUS);
        wait_until("the driver is told", || status() & NEEDS_RESET != 0);
    }
    driver.start(&host);
    driver.serve(&host, 0..5);
}

#[test]
fn back_end_that_dies_harms_its_own_device_alone() {
    if !kvm_or_skip("back_end_that_dies_harms_its_own_device_alone") {
        return;
    }
    let mut host = Host::running(&[(fs(), Fault::None), (fs(), Fault::None)]);
    let mut drivers = [Driver::new(0, &fs()), Driver::new(1, &fs())];
    for driver in &mut drivers {
        driver.start(&host);
        driver.serve(&host, 0..5);
    }

    let [dead, alive] = &mut drivers;
    // The back end has a request when it dies.
    host.back_ends[0].freeze();
    dead.submit(&host, 5);
    dead.registers.notify(&host.machine, 1);
    host.back_ends[0].kill();

    wait_until("the driver is told", || dead.registers.read(&host.machine, STATUS) & NEEDS_RESET != 0);
    dead.registers.acknowledge(&host.machine, 2);
    alive.serve(&host, 5..10);
    let target = Host::new(true, &[(fs(), Fault::None), (fs(), Fault::None)]).unwrap();
    let (migration, incoming) = start(&host, &target);
    let told = match migration {
        Err(error) => error.to_string(),
        Ok(migration) => format!("{:?}", migration.wait()),
    };
    assert!(told.contains("vhost-user/0") && told.contains("closed the connection"), "{told}");
    let _ = incoming.cancel();
    // The driver finds no working device when it tries again, and the guest continues.
    dead.start(&host);
    wait_until("the driver is told again", || dead.registers.read(&host.machine, STATUS) & NEEDS_RESET != 0);
    host.machine.pause();
    host.machine.cont().unwrap();
    alive.serve(&host, 10..20);
}

#[test]
fn configuration_that_lies_is_refused_with_the_device() {
    if !kvm_or_skip("configuration_that_lies_is_refused_with_the_device") {
        return;
    }
    let card = DeviceKind::Network { mac: None };
    let cases = [
        (fs(), Fault::WrongConfiguration, "is not text"),
        (fs(), Fault::ShortConfiguration, "GET_CONFIG"),
        (fs(), Fault::NoConfiguration, "give it (`tag=NAME`)"),
        (fs(), Fault::NoDeviceState, "VHOST_USER_PROTOCOL_F_DEVICE_STATE"),
        (DeviceKind::Block, Fault::WrongConfiguration, "not a valid block size of a disk"),
        (DeviceKind::Block, Fault::NoConfiguration, "does not report the disk's size"),
        (card, Fault::NoConfiguration, "give it (`mac=ADDRESS`)"),
    ];
    for (kind, fault, says) in cases {
        let why = Host::new(true, &[(kind.clone(), fault)]).map(drop).unwrap_err().to_string();
        assert!(why.contains("vhost-user/0") && why.contains(says), "{kind:?}, {fault:?}: {why}");
    }
}

#[test]
fn configuration_that_changes_is_told_to_the_driver() {
    if !kvm_or_skip("configuration_that_changes_is_told_to_the_driver") {
        return;
    }
    let host = Host::running(&[(DeviceKind::Block, Fault::None)]);
    let mut driver = Driver::new(0, &DeviceKind::Block);
    driver.start(&host);
    driver.serve(&host, 0..3);
    let (registers, machine) = (driver.registers, &host.machine);
    let before = registers.read(machine, GENERATION);
    assert_eq!(registers.configuration(machine, 8), SECTORS.to_le_bytes());

    // Writes the event like the back end's message.
    machine.vhost_user()[0].changed().write(1).unwrap();

    registers.acknowledge(machine, 2);
    assert_ne!(registers.read(machine, GENERATION), before);
    assert_eq!(registers.configuration(machine, 8), (SECTORS + 3).to_le_bytes());
    driver.serve(&host, 3..6);
}

#[test]
fn device_that_differs_is_refused_by_name() {
    if !kvm_or_skip("device_that_differs_is_refused_by_name") {
        return;
    }
    let tagged = |tag: &str| DeviceKind::FileSystem { tag: Some(tag.to_owned()) };
    let source = Host::new(true, &[(tagged("one"), Fault::None)]).unwrap();
    let record = source.machine.compatibility().save().unwrap();
    let stateless = Host::new(true, &[(DeviceKind::Block, Fault::NoDeviceState)]).unwrap();
    let its_record = stateless.machine.compatibility().save().unwrap();
    let cases = [
        (
            tagged("two"),
            &record,
            "virtio device 0: its tag (vhost-user/0 (fs)): the source has one, this machine has two",
        ),
        (DeviceKind::Block, &record, "its kind (vhost-user/0 (blk)): the source has 26, this machine has 2"),
        (DeviceKind::Network { mac: Some([2; 6]) }, &record, "the source has 26, this machine has 1"),
        (DeviceKind::Block, &its_record, "the source has a vhost-user back end that does not save its state"),
    ];
    for (kind, record, says) in cases {
        let target = Host::new(true, &[(kind, Fault::None)]).unwrap();
        let why = target.machine.compatibility().load(1, record).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
    let none = KvmMachine::new(MachineConfig { incoming: true, ..MachineConfig::new("none") }).unwrap();
    let why = none.compatibility().load(1, &record).unwrap_err().to_string();
    assert!(why.contains("a device of kind 26") && why.contains("none"), "{why}");
    let same = Host::new(true, &[(tagged("one"), Fault::None)]).unwrap();
    same.machine.compatibility().load(1, &record).unwrap();
}
