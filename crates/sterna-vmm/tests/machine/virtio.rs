//! Tests of the machine's virtio devices: equality of both sides, disk locks, and invalid states.
#![allow(missing_docs)]

use std::path::Path;
use std::sync::Arc;

use crate::common::{copy_ram, flat, guests, kvm_or_skip, load, save, wait_for};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use sterna::{SourceVm, TargetVm, Vm};
use sterna_vmm::{DiskMigration, DiskOptions, KvmMachine, MachineConfig, NetOptions, VmmError};

const DISK_BYTES: u64 = 1 << 20;

fn image(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

/// A machine with these disks and a source of random bytes. Without a guest, it waits for one.
fn machine(disks: Vec<DiskOptions>, has_guest: bool) -> Result<Arc<KvmMachine>, VmmError> {
    KvmMachine::new(MachineConfig {
        guest: if has_guest { flat(&guests::counter()) } else { None },
        incoming: !has_guest,
        disks,
        entropy: true,
        ..MachineConfig::new("virtio")
    })
}

fn shared(path: &Path) -> Vec<DiskOptions> {
    vec![DiskOptions::new(path)]
}

#[test]
fn device_that_differs_is_refused_by_name_before_any_ram_moves() {
    if !kvm_or_skip("device_that_differs_is_refused_by_name_before_any_ram_moves") {
        return;
    }
    let (disk, longer) = (image(DISK_BYTES), image(2 * DISK_BYTES));
    let source = machine(shared(disk.path()), true).unwrap();
    let record = source.compatibility().save().unwrap();
    let of = |change: &dyn Fn(&mut DiskOptions)| {
        let mut options = DiskOptions::new(disk.path());
        change(&mut options);
        vec![options]
    };
    let other = image(DISK_BYTES);
    let mut own = DiskOptions::new(other.path());
    own.migration = DiskMigration::None;
    let cases = [
        (vec![own], "disk 0", "the source has migrate=shared, this machine has migrate=none"),
        (
            shared(longer.path()),
            "disk 0",
            "length in sectors of 512 bytes (disk 0): the source has 2048, this machine has 4096",
        ),
        (of(&|disk| disk.queues = 2), "disk 0", "its queues"),
        (of(&|disk| disk.is_read_only = true), "disk 0", "its features"),
        (Vec::new(), "its kind", "the source has 2, this machine has 4"),
        ([shared(disk.path()), shared(disk.path())].concat(), "virtio device 1 (disk 1)", "its kind"),
    ];
    for (disks, device, says) in cases {
        let target = machine(disks, false).unwrap();
        let why = target.compatibility().load(1, &record).unwrap_err().to_string();
        assert!(why.contains(device) || says.contains("kind"), "{why}");
        assert!(why.contains(says), "{why}");
    }
    // First a target with the same devices, then one without any.
    machine(shared(disk.path()), false).unwrap().compatibility().load(1, &record).unwrap();
    let none = KvmMachine::new(MachineConfig { incoming: true, ..MachineConfig::new("none") }).unwrap();
    let why = none.compatibility().load(1, &record).unwrap_err().to_string();
    assert!(why.contains("virtio device 0") && why.contains("this machine has none"), "{why}");
    let record = none.compatibility().save().unwrap();
    let target = machine(shared(disk.path()), false).unwrap();
    let why = target.compatibility().load(1, &record).unwrap_err().to_string();
    assert!(why.contains("the source has none, this machine has disk 0"), "{why}");
}

#[test]
fn disk_belongs_to_one_machine_at_a_time() {
    if !kvm_or_skip("disk_belongs_to_one_machine_at_a_time") {
        return;
    }
    let disk = image(DISK_BYTES);
    let source = machine(shared(disk.path()), true).unwrap();
    let refused = machine(shared(disk.path()), true).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("is locked") && refused.contains(disk.path().to_str().unwrap()), "{refused}");
    // A machine that waits gets the disk only with the guest.
    let target = machine(shared(disk.path()), false).unwrap();
    let hook = |machine: &KvmMachine| {
        machine.hooks().into_iter().find(|hook| hook.name() == "disk 0").expect("a hook for the disk")
    };
    assert!(hook(&target).acquire().is_err());
    hook(&source).release().unwrap();
    hook(&target).acquire().unwrap();
    assert!(hook(&source).take_back().is_err());
    hook(&target).give_back();
    hook(&source).take_back().unwrap();
    // A destination with its own file has the disk from the start.
    let mut own = DiskOptions::new(disk.path());
    own.migration = DiskMigration::None;
    assert!(machine(vec![own.clone()], false).is_err());
    drop((source, target));
    let target = machine(vec![own], false).unwrap();
    assert_eq!(target.hooks().iter().filter(|hook| hook.name() == "disk 0").count(), 0);
}

#[test]
fn guest_that_uses_no_device_moves_with_them() {
    if !kvm_or_skip("guest_that_uses_no_device_moves_with_them") {
        return;
    }
    let disk = image(DISK_BYTES);
    let source = machine(shared(disk.path()), true).unwrap();
    source.resume().unwrap();
    let count = |machine: &KvmMachine| machine.ram().block(0).read_u64(guests::COUNTERS).unwrap();
    wait_for("counting", || count(&source) > 100);
    let target = machine(shared(disk.path()), false).unwrap();
    SourceVm::stop(&*source).unwrap();
    target.compatibility().load(1, &source.compatibility().save().unwrap()).unwrap();
    copy_ram(&source, &target);
    source.hooks().iter().for_each(|hook| hook.release().unwrap());
    load(&target, &save(&source));
    let before = count(&source);
    TargetVm::start(&*target).unwrap();
    wait_for("counting on", || count(&target) > before + 100);
}

#[test]
fn garbled_state_of_a_device_is_an_error_or_a_value_and_never_a_panic() {
    if !kvm_or_skip("garbled_state_of_a_device_is_an_error_or_a_value_and_never_a_panic") {
        return;
    }
    let disk = image(DISK_BYTES);
    let source = machine(shared(disk.path()), true).unwrap();
    let target = machine(shared(disk.path()), false).unwrap();
    let good = save(&source);
    let devices = target.devices();
    let places: Vec<usize> =
        (0..devices.len()).filter(|index| devices[*index].name().starts_with("virtio/")).collect();
    assert_eq!(places.len(), 2);
    let mut runner = TestRunner::new(Config {
        cases: 300,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(sterna_testing::seed("garbled_state_of_a_device")),
        ..Config::default()
    });
    let edits = proptest::collection::vec((any::<usize>(), any::<u8>()), 1..6);
    let result = runner.run(&(any::<bool>(), edits), |(second, edits)| {
        let index = places[usize::from(second)];
        let mut body = good[index].clone();
        for (at, value) in edits {
            let at = at % body.len();
            body[at] = value;
        }
        target.reset();
        for (device, body) in devices.iter().zip(&good).take(index) {
            device.load(1, body).unwrap();
        }
        // A device that accepts a state can run with it. The worst outcome is a failed request of its driver.
        if devices[index].load(1, &body).is_ok() {
            devices[index].save().unwrap();
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn disk_that_grows_is_longer_for_its_guest_and_for_the_other_side() {
    if !kvm_or_skip("disk_that_grows_is_longer_for_its_guest_and_for_the_other_side") {
        return;
    }
    let disk = image(DISK_BYTES);
    let source = machine(shared(disk.path()), true).unwrap();
    let target = machine(shared(disk.path()), false).unwrap();
    let why = |machine: &KvmMachine, bytes| machine.grow_disk(0, bytes).unwrap_err().to_string();
    assert!(why(&target, 2 * DISK_BYTES).contains("waits for an incoming migration"));
    assert!(why(&source, DISK_BYTES / 2).contains("cannot become shorter"));
    assert!(why(&source, DISK_BYTES + 1).contains("whole number of sectors"));
    assert!(source.grow_disk(1, DISK_BYTES).unwrap_err().to_string().contains("there is no such disk"));

    // A driver that is ready is notified: the interrupt's cause is a change of the configuration.
    let field = |body: &[u8], tag: &[u8]| {
        let at = body.windows(4).position(|bytes| bytes == tag).unwrap() + 8;
        u64::from_le_bytes(body[at..at + 8].try_into().unwrap())
    };
    let ready = |machine: &KvmMachine, status: u8| {
        let mut bodies = save(machine);
        let index = machine.devices().iter().position(|device| device.name() == "virtio/0").unwrap();
        let at = bodies[index].windows(4).position(|bytes| bytes == b"stat").unwrap() + 8;
        bodies[index][at] = status;
        (index, bodies)
    };
    let (index, bodies) = ready(&source, 15);
    source.hooks().iter().for_each(|hook| hook.release().unwrap());
    load(&target, &bodies);
    TargetVm::take_over_paused(&*target).unwrap();
    target.grow_disk(0, 2 * DISK_BYTES).unwrap();
    assert_eq!(disk.as_file().metadata().unwrap().len(), 2 * DISK_BYTES);
    assert_eq!(target.disks()[0].1, 2 * DISK_BYTES);
    let body = &save(&target)[index];
    assert_eq!(field(body, b"conf"), 2 * DISK_BYTES / 512);
    assert_eq!(field(body, b"stat"), 2 << 32 | 15);

    // The next destination was built before the growth and detects the new length by itself, even if the disk
    // grows during the migration.
    let third = machine(shared(disk.path()), false).unwrap();
    target.grow_disk(0, 3 * DISK_BYTES).unwrap();
    third.compatibility().load(1, &target.compatibility().save().unwrap()).unwrap();
    target.grow_disk(0, 4 * DISK_BYTES).unwrap();
    target.hooks().iter().for_each(|hook| hook.release().unwrap());
    load(&third, &save(&target));
    assert_eq!(third.disks()[0].1, 4 * DISK_BYTES);
    // After a failure the machine waits again, without any state of the guest.
    third.hooks().iter().for_each(|hook| hook.give_back());
    third.reset();
    assert_eq!(field(&save(&third)[index], b"stat"), 0);
    load(&third, &save(&target));
}

#[test]
fn disk_that_is_copied_grows_before_or_after() {
    if !kvm_or_skip("disk_that_is_copied_grows_before_or_after") {
        return;
    }
    let own = |file: &tempfile::NamedTempFile| {
        let mut options = DiskOptions::new(file.path());
        options.migration = DiskMigration::Copy;
        vec![options]
    };
    let (disk, there) = (image(DISK_BYTES), image(DISK_BYTES));
    let source = machine(own(&disk), true).unwrap();
    let target = machine(own(&there), false).unwrap();
    let stream = source.devices().iter().find_map(|device| device.stream()).unwrap();
    stream.begin_save().unwrap();
    let why = source.grow_disk(0, 2 * DISK_BYTES).unwrap_err().to_string();
    assert!(why.contains("is being copied"), "{why}");
    stream.end_save().unwrap();
    source.grow_disk(0, 2 * DISK_BYTES).unwrap();
    let why =
        target.compatibility().load(1, &source.compatibility().save().unwrap()).unwrap_err().to_string();
    assert!(
        why.contains("length in sectors of 512 bytes (disk 0): the source has 4096, this machine has 2048"),
        "{why}"
    );
}

/// Number of queues of a tap that transmit packets.
fn queues(tap: &str) -> usize {
    let entries = std::fs::read_dir(format!("/sys/class/net/{tap}/queues")).unwrap();
    entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("tx-")).count()
}

#[test]
fn pairs_of_queues_that_a_guest_uses_move_with_it() {
    let test = "pairs_of_queues_that_a_guest_uses_move_with_it";
    if !kvm_or_skip(test) {
        return;
    }
    let card = |number: u32, queues, has_guest: bool| {
        let mut options = NetOptions::new(format!("sterna{number}-{}", std::process::id() % 100_000));
        options.queues = queues;
        options.mac = Some("52:54:00:00:00:01".parse().unwrap());
        KvmMachine::new(MachineConfig {
            guest: if has_guest { flat(&guests::counter()) } else { None },
            incoming: !has_guest,
            nets: vec![options],
            ..MachineConfig::new("pairs")
        })
    };
    let source = match card(0, 3, true) {
        Ok(source) => source,
        Err(error) => {
            crate::common::skip(test, error);
            return;
        }
    };
    let record = source.compatibility().save().unwrap();
    let why = card(1, 1, false).unwrap().compatibility().load(1, &record).unwrap_err().to_string();
    assert!(why.contains("network card 0") && why.contains("its queues"), "{why}");

    let target = card(2, 3, false).unwrap();
    target.compatibility().load(1, &record).unwrap();
    let good = save(&source);
    let index = source.devices().iter().position(|device| device.name() == "virtio/0").unwrap();
    let with_active = |active: u8| {
        let mut bodies = good.clone();
        let at = |tag: &[u8]| good[index].windows(4).position(|bytes| bytes == tag).unwrap() + 8;
        bodies[index][at(b"more")] = active;
        // A driver that is ready and supports several pairs (VIRTIO_NET_F_MQ, VIRTIO_F_VERSION_1).
        bodies[index][at(b"stat")] = 15;
        bodies[index][at(b"feat") + 2] = 1 << 6;
        bodies[index][at(b"feat") + 4] = 1;
        bodies
    };
    for wrong in [0, 4] {
        let bodies = with_active(wrong);
        let mut results =
            target.devices().into_iter().zip(&bodies).map(|(device, body)| device.load(1, body));
        let why = results.find_map(Result::err).unwrap().to_string();
        assert!(why.contains("active pairs of queues, of 3"), "{why}");
        target.reset();
    }
    load(&target, &with_active(2));
    assert_eq!(save(&target)[index], with_active(2)[index]);
    let tap = format!("sterna2-{}", std::process::id() % 100_000);
    assert_eq!(queues(&tap), 3);
    copy_ram(&source, &target);
    TargetVm::start(&*target).unwrap();
    wait_for("queues that are not used go", || queues(&tap) == 2);
}
