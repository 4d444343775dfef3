//! Tests of disks in qcow2 files: refused files, copies, and invalid headers.
#![allow(missing_docs)]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::common::{flat, guests, kvm_or_skip};
use imago::file::File as Storage;
use imago::{FormatAccess, FormatCreateBuilder, qcow2::Qcow2};
use sterna::DeviceStream;
use sterna_vmm::{DiskFormat, DiskMigration, DiskOptions, KvmMachine, MachineConfig, VmmError};
use tempfile::NamedTempFile;

const DISK_BYTES: u64 = 3 << 20;

/// An empty qcow2 file with the options that `change` sets.
fn qcow2(
    change: impl FnOnce(imago::qcow2::Qcow2CreateBuilder<Storage>) -> imago::qcow2::Qcow2CreateBuilder<Storage>,
) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let storage = Storage::try_from(file.reopen().unwrap()).unwrap();
    change(Qcow2::create_builder(storage).size(DISK_BYTES)).create().unwrap();
    file
}

fn content(path: &Path, is_written: bool) -> FormatAccess<Storage> {
    FormatAccess::new(Qcow2::<Storage>::open_path(path, is_written).unwrap())
}

fn options(path: &Path, migration: DiskMigration) -> DiskOptions {
    let mut options = DiskOptions::new(path);
    options.format = DiskFormat::Qcow2;
    options.migration = migration;
    options
}

fn machine(disk: DiskOptions, has_guest: bool) -> Result<Arc<KvmMachine>, VmmError> {
    KvmMachine::new(MachineConfig {
        guest: if has_guest { flat(&guests::counter()) } else { None },
        incoming: !has_guest,
        disks: vec![disk],
        ..MachineConfig::new("qcow2")
    })
}

fn stream(machine: &KvmMachine) -> Arc<dyn DeviceStream> {
    machine.devices().iter().find_map(|device| device.stream()).expect("the disk is copied")
}

#[test]
fn file_that_names_another_one_needs_it_on_the_command_line() {
    if !kvm_or_skip("file_that_names_another_one_needs_it_on_the_command_line") {
        return;
    }
    let secret = NamedTempFile::new().unwrap();
    secret.as_file().set_len(DISK_BYTES).unwrap();
    let name = secret.path().to_str().unwrap();
    let with_backing = qcow2(|builder| builder.backing(name.to_owned(), "raw".to_owned()));
    let storage = || Storage::try_from(secret.reopen().unwrap()).unwrap();
    let with_data = qcow2(|builder| builder.data_file(name.to_owned(), storage()));
    let plain = qcow2(|builder| builder);
    let of = |file: &NamedTempFile, change: &dyn Fn(&mut DiskOptions)| {
        let mut options = options(file.path(), DiskMigration::Shared);
        change(&mut options);
        machine(options, true)
    };
    let backing = |format| move |disk: &mut DiskOptions| disk.backing = Some((name.into(), format));
    let data = |disk: &mut DiskOptions| disk.data_file = Some(name.into());
    let raw = |disk: &mut DiskOptions| disk.format = DiskFormat::Raw;
    let chain = |disk: &mut DiskOptions| disk.backing = Some((with_backing.path().into(), DiskFormat::Qcow2));
    let deeper = qcow2(|builder| builder.backing("middle".to_owned(), "qcow2".to_owned()));
    for (refused, says) in [
        (of(&with_backing, &|_| ()), "give it with `backing=FILE,backing-format=raw|qcow2`"),
        (of(&with_data, &|_| ()), "give it with `data-file=FILE`"),
        (of(&plain, &backing(DiskFormat::Raw)), "leave `backing` out"),
        (of(&plain, &data), "leave `data-file` out"),
        (of(&with_backing, &backing(DiskFormat::Qcow2)), "Not a qcow2 file"),
        (of(&deeper, &chain), "has a backing file or a data file itself"),
        (
            of(&plain, &|disk| {
                raw(disk);
                data(disk)
            }),
            "add `format=qcow2`",
        ),
        (of(&secret, &|_| ()), "Not a qcow2 file"),
    ] {
        let why = refused.map(|_| ()).unwrap_err().to_string();
        assert!(why.contains(says), "{says}: {why}");
    }
    of(&with_backing, &backing(DiskFormat::Raw)).unwrap();
    of(&with_data, &data).unwrap();
    // Opened as a raw disk: the bytes of the file are the disk's content, whatever format they resemble.
    of(&with_backing, &raw).unwrap();
    // Another machine opens the backing file for writing.
    let writer = machine(DiskOptions::new(secret.path()), true).unwrap();
    let why = of(&with_backing, &backing(DiskFormat::Raw)).map(|_| ()).unwrap_err().to_string();
    assert!(why.contains("its backing file: it is locked"), "{why}");
    drop(writer);
}

/// The content that the guest reads is copied, also into another format.
#[test]
fn disk_that_is_copied_arrives_as_the_guest_reads_it() {
    if !kvm_or_skip("disk_that_is_copied_arrives_as_the_guest_reads_it") {
        return;
    }
    let seed = sterna_testing::seed("disk_that_is_copied_arrives");
    let mut random = fastrand::Rng::with_seed(seed);
    for into in [DiskFormat::Qcow2, DiskFormat::Raw] {
        let from = qcow2(|builder| builder);
        let to = qcow2(|builder| builder.cluster_size(4096));
        for file in [&from, &to] {
            let disk = content(file.path(), true);
            for _ in 0..20 {
                let bytes = vec![random.u8(..); random.usize(1..100) * 512];
                disk.write(&bytes, random.u64(0..DISK_BYTES / 512 - 100) * 512).unwrap();
            }
        }
        if into == DiskFormat::Raw {
            to.as_file().set_len(0).unwrap();
            to.as_file().set_len(DISK_BYTES).unwrap();
            to.as_file().write_all_at(&[9; 5000], random.u64(0..DISK_BYTES - 5000)).unwrap();
        }
        let source = machine(options(from.path(), DiskMigration::Copy), true).unwrap();
        let mut theirs = options(to.path(), DiskMigration::Copy);
        theirs.format = into;
        let target = machine(theirs, false).unwrap();
        target.compatibility().load(1, &source.compatibility().save().unwrap()).unwrap();
        let (save, load) = (stream(&source), stream(&target));
        save.begin_save().unwrap();
        load.begin_load().unwrap();
        save.stop().unwrap();
        let (mut bytes, mut sent) = (vec![0; 70_000], 0);
        loop {
            match save.read(&mut bytes).unwrap() {
                0 => break,
                length => load.write(&bytes[..length]).unwrap(),
            }
            sent += 1;
        }
        assert!(sent > 0, "seed {seed}");
        load.finish_load(&[]).unwrap();
        drop((save, load, source, target));
        let mut both = [(from.path(), DiskFormat::Qcow2), (to.path(), into)].map(|(path, format)| {
            let mut bytes = vec![0; DISK_BYTES as usize];
            match format {
                DiskFormat::Qcow2 => content(path, false).read(&mut bytes, 0).unwrap(),
                _ => bytes = std::fs::read(path).unwrap(),
            }
            bytes
        });
        assert!(both[0] == both[1], "seed {seed}, {into:?}");
        assert!(both[0].iter_mut().any(|byte| *byte != 0));
    }
}

/// An invalid header or table gives an error, or a disk with some content.
#[test]
fn header_that_lies_is_an_error_or_a_disk_and_never_a_panic() {
    if !kvm_or_skip("header_that_lies_is_an_error_or_a_disk_and_never_a_panic") {
        return;
    }
    let seed = sterna_testing::seed("header_that_lies");
    let mut random = fastrand::Rng::with_seed(seed);
    let file = qcow2(|builder| builder.cluster_size(512));
    content(file.path(), true).write(&vec![7; 100_000], 4096).unwrap();
    let good = std::fs::read(file.path()).unwrap();
    let (mut opened, mut refused, mut written) = (0, 0, 0);
    for round in 0..200 {
        let mut bytes = good.clone();
        for _ in 0..random.usize(1..5) {
            // The header, or any table after it.
            let at = if random.bool() { random.usize(4..112) } else { random.usize(..bytes.len()) };
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random.u8(..)][random.usize(..6)];
        }
        std::fs::write(file.path(), &bytes).unwrap();
        match machine(options(file.path(), DiskMigration::Copy), true) {
            Ok(source) => {
                opened += 1;
                let save = stream(&source);
                let mut bytes = vec![0; 1 << 20];
                // An error, or as many bytes as a disk of this length has.
                let _ = save.begin_save();
                for _ in 0..8 {
                    if !matches!(save.read(&mut bytes), Ok(1..)) {
                        break;
                    }
                }
                save.end_save().unwrap();
                let block =
                    [&0u64.to_le_bytes()[..], &512u32.to_le_bytes(), &0u32.to_le_bytes(), &[7; 512]].concat();
                if save.begin_load().and_then(|()| save.write(&block)).is_ok() {
                    written += 1;
                }
            }
            Err(VmmError::Config { what: "disk", .. }) => refused += 1,
            Err(other) => panic!("seed {seed}, round {round}: {other}"),
        }
    }
    assert!(opened > 20 && refused > 20, "seed {seed}: {opened} opened, {refused} refused");
    assert!(written > 10, "seed {seed}: {written} written");
}
