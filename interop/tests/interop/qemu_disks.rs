//! qcow2 disks that QEMU's tools have made. The tools also check disks that a machine has written.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_interop::{Failure, Root, kvm_for};
use sterna_vmm::{DiskFormat, DiskMigration, DiskOptions, GuestImage, KvmMachine, MachineConfig};

const DISK_BYTES: u64 = 64 << 20;

fn words(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

struct Tools {
    root: Root,
    directory: tempfile::TempDir,
}

impl Tools {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `qemu-img`. Words that begin with `@` are files in the test's directory.
    fn image(&self, line: &str) -> Result<(), Failure> {
        let name = |word: &str| word.replace('@', &format!("{}/", self.directory.path().display()));
        let output = self.root.command("qemu-img").args(line.split(' ').map(name)).output().map_err(words)?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if output.status.success() { Ok(()) } else { Err(format!("qemu-img {line}: {}", said.concat())) }
    }
}

fn options(path: &Path, format: DiskFormat) -> DiskOptions {
    let mut options = DiskOptions::new(path);
    options.format = format;
    options.migration = DiskMigration::Copy;
    options
}

/// Copies a disk in the same way as a migration.
fn copy(from: DiskOptions, to: DiskOptions) -> Result<(), Failure> {
    let machine = |disk, incoming| {
        let config = MachineConfig {
            guest: Some(GuestImage::Flat64 { code: vec![0xf4], parameters: Vec::new() }),
            incoming,
            disks: vec![disk],
            ..MachineConfig::new("disks")
        };
        KvmMachine::new(config).map_err(words)
    };
    let (source, target) = (machine(from, false)?, machine(to, true)?);
    let stream = |machine: &Arc<KvmMachine>| {
        machine.devices().iter().find_map(|device| device.stream()).ok_or("no disk is copied")
    };
    let (save, load) = (stream(&source)?, stream(&target)?);
    save.begin_save().map_err(words)?;
    load.begin_load().map_err(words)?;
    let mut bytes = vec![0; 1 << 20];
    loop {
        match save.read(&mut bytes).map_err(words)? {
            0 => break load.finish_load(&[]).map_err(words),
            length => load.write(&bytes[..length]).map_err(words)?,
        }
    }
}

#[test]
fn qcow2_of_qemu_is_read_and_what_is_written_is_sound_for_qemu() -> Result<(), Failure> {
    let test = "qcow2_of_qemu_is_read_and_what_is_written_is_sound_for_qemu";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let tools = Tools { root, directory: tempfile::tempdir().map_err(words)? };
    let mut random = fastrand::Rng::with_seed(11);
    let mut bytes = vec![0; DISK_BYTES as usize];
    for _ in 0..60 {
        let (start, length) = (random.usize(..bytes.len() - 300_000), random.usize(1..300_000));
        let value = random.u8(..);
        bytes[start..start + length].iter_mut().enumerate().for_each(|(at, byte)| *byte = value ^ at as u8);
    }
    std::fs::write(tools.path("raw"), &bytes).map_err(words)?;
    bytes[..20 << 20].fill(3);
    std::fs::write(tools.path("other"), &bytes).map_err(words)?;
    for (name, made) in [
        ("plain", "convert -O qcow2 @raw @plain"),
        ("old", "convert -O qcow2 -o compat=0.10 @raw @old"),
        ("packed", "convert -O qcow2 -c @raw @packed"),
        ("small", "convert -O qcow2 -o cluster_size=4k,refcount_bits=1 @raw @small"),
        ("full", "convert -O qcow2 -o preallocation=falloc @raw @full"),
    ] {
        tools.image(made)?;
        // Copies into a disk with other content in another format, and back into a new disk.
        tools.image("convert -O qcow2 @other @to")?;
        tools.image(&format!("create -q -f qcow2 @new {DISK_BYTES}"))?;
        let of = |name| options(&tools.path(name), DiskFormat::Qcow2);
        for to in ["to", "new"] {
            copy(of(name), of(to)).map_err(|why| format!("{name} into {to}: {why}"))?;
            tools.image(&format!("check -q -f qcow2 @{to}")).map_err(|why| format!("{name}: {why}"))?;
            tools.image(&format!("compare -q -f qcow2 -F raw @{to} @raw"))?;
        }
        // Copies from that disk into a file of the same kind.
        tools.image(&format!("{} -q", made.replace("@raw", "@other")))?;
        copy(of("to"), of(name)).map_err(|why| format!("into {name}: {why}"))?;
        tools.image(&format!("check -q -f qcow2 @{name}")).map_err(|why| format!("{name}: {why}"))?;
        tools.image(&format!("compare -q -f qcow2 -F raw @{name} @raw"))?;
    }
    // A disk with a backing file, and the full content in another file.
    tools.image("create -q -f qcow2 -F raw -b @raw @top")?;
    let mut top = options(&tools.path("top"), DiskFormat::Qcow2);
    top.backing = Some((tools.path("raw"), DiskFormat::Raw));
    tools.image("convert -O qcow2 -o data_file=@data @other @beside")?;
    let mut beside = options(&tools.path("beside"), DiskFormat::Qcow2);
    beside.data_file = Some(tools.path("data"));
    copy(top.clone(), beside.clone())?;
    copy(options(&tools.path("other"), DiskFormat::Raw), top)?;
    for (name, content) in [("top", "other"), ("beside", "raw")] {
        tools.image(&format!("check -q -f qcow2 @{name}")).map_err(|why| format!("{name}: {why}"))?;
        tools.image(&format!("compare -q -f qcow2 -F raw @{name} @{content}"))?;
    }
    Ok(())
}
