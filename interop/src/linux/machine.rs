//! Makes machines, and selects the work of their guests.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use sterna_vmm::{
    DiskFormat, DiskMigration, DiskOptions, GuestImage, KvmMachine, LinuxImage, MachineConfig, NetOptions,
};

use super::console::Console;
use super::files::Files;
use super::processes::BackEnd;
use super::ways::Way;
use super::{guest, network, said};
use crate::kernel::output;
use crate::scenarios::Failure;

/// The lab VM's own disk. Writes to it are discarded when the VM ends.
pub(super) const ROOT_DISK: &str = "/dev/vda";
const RAM: u64 = 160 << 20;
/// RAM of a guest with Debian programs.
const RAM_WITH_ROOT: u64 = 256 << 20;
/// RAM of a guest that reports free memory. Linux reports only when it has 64 MiB more than it needs.
const AMPLE_RAM: u64 = 512 << 20;
const DISK_BYTES: u64 = 8 << 20;

/// Settings of a machine, and the work of its guest.
#[derive(Default)]
pub(super) struct Setup {
    /// Number of vCPUs; 0 means 1.
    pub(super) vcpus: u8,
    /// Ways of the moves, used in turn. With any way, rings track writes: in every second machine, or in all
    /// with several vCPUs. An empty list: plain moves.
    pub(super) ways: &'static [Way],
    /// The guest works in a root of Debian packages, on [`ROOT_DISK`].
    pub(super) has_root: bool,
    /// The guest has a disk of its own, which moves in this way.
    pub(super) disk: Option<DiskMigration>,
    /// The file of that disk is in qcow2 format.
    pub(super) is_qcow2: bool,
    /// Other processes serve that disk, and a directory of the host.
    pub(super) has_processes: bool,
    pub(super) has_network: bool,
    /// The guest's network is another process, passt.
    pub(super) has_passt: bool,
    /// The guest reads [`guest::END`] from a virtio console.
    pub(super) has_console: bool,
    /// The guest reports free pages at any time.
    pub(super) reports: bool,
    /// The guest gives free page hints during a move.
    pub(super) hints: bool,
    /// The guest works less at each step and between moves, so that all ways take a short time.
    pub(super) is_brief: bool,
    /// Seed of disturbed moves between the others. `None`: no disturbed moves.
    pub(super) disturbed: Option<u64>,
    /// Bytes of RAM; 0: as much as the guest needs.
    pub(super) ram_bytes: u64,
    /// How the guest ends: [`guest::RESETS`], or it switches the machine off.
    pub(super) ends: &'static str,
}

impl Setup {
    /// A guest that uses every device.
    pub(super) fn working(vcpus: u8) -> Self {
        Self {
            vcpus,
            ways: &Way::ALL,
            has_root: true,
            disk: Some(DiskMigration::Copy),
            has_network: true,
            has_console: true,
            ..Self::default()
        }
    }

    fn ram_bytes(&self) -> u64 {
        match self {
            Self { ram_bytes: 1.., .. } => self.ram_bytes,
            Self { reports: true, .. } | Self { hints: true, .. } => AMPLE_RAM,
            Self { has_root: true, .. } => RAM_WITH_ROOT,
            _ => RAM,
        }
    }

    /// The kernel's command line for the guest.
    pub(super) fn command_line(&self, ticks: u64) -> String {
        // Under QEMU 7.2's TCG, a nested guest's XSETBV bypasses KVM, so KVM reports wrong sizes of XSAVE's
        // area.
        let mut line = format!("console=ttyS0 panic=-1 noxsave LAB={} {}={ticks}", guest::NAME, guest::TICKS);
        let mut add = |name: &str, value: &str| line.push_str(&format!(" {name}={value}"));
        let disks = ["/dev/vda", "/dev/vdb"];
        if self.has_root {
            add(guest::ROOT, disks[0]);
        }
        if self.disk.is_some() {
            add(guest::DISK, disks[usize::from(self.has_root)]);
        }
        if self.has_processes {
            add(guest::SHARE, guest::YES);
        }
        if self.has_network || self.has_passt {
            add(guest::NETWORK, guest::YES);
        }
        if self.reports || self.hints {
            add(guest::REPORTS, guest::YES);
        }
        if self.is_brief {
            add(guest::BRIEF, guest::YES);
        }
        if self.has_console {
            add(guest::CONSOLE, "/dev/hvc0");
        }
        if !self.ends.is_empty() {
            add(guest::ENDS, self.ends);
        }
        line
    }
}

/// A machine, and the processes that serve its devices. They end after the machine.
pub(super) struct Place {
    machine: Arc<KvmMachine>,
    _processes: Vec<BackEnd>,
}

impl std::ops::Deref for Place {
    type Target = Arc<KvmMachine>;

    fn deref(&self) -> &Self::Target {
        &self.machine
    }
}

/// Boots a machine whose guest ticks `ticks` times. Returns it with its console.
pub(super) fn booted(setup: &Setup, disk: Option<&Path>, ticks: u64) -> Result<(Place, Console), Failure> {
    let (console, files) = (Console::default(), Files::new()?);
    let image = LinuxImage {
        kernel: files.kernel(),
        initrd: Some(files.initrd()),
        command_line: setup.command_line(ticks),
    };
    let machine = machine(setup, disk, Some(GuestImage::Linux(image)), None, &console)?;
    machine.resume().map_err(said)?;
    Ok((machine, console))
}

/// Makes a machine. Without a guest, it waits for one.
pub(super) fn machine(
    setup: &Setup,
    disk: Option<&Path>,
    guest: Option<GuestImage>,
    dirty_ring_size: Option<u32>,
    console: &Console,
) -> Result<Place, Failure> {
    let vcpus = setup.vcpus.max(1);
    let card = |tap| {
        let mut card = NetOptions::new(tap);
        card.queues = u16::from(vcpus).min(NetOptions::QUEUES_MAX);
        card
    };
    let tap = setup.has_network.then(network::new_tap);
    let mut disks = Vec::new();
    if setup.has_root {
        disks.push(DiskOptions::new(ROOT_DISK));
    }
    let mut processes = Vec::new();
    match disk.zip(setup.disk) {
        Some((path, _)) if setup.has_processes => processes = BackEnd::start_all(path)?,
        Some((path, migration)) => {
            let mut options = DiskOptions::new(path);
            options.migration = migration;
            options.format = if setup.is_qcow2 { DiskFormat::Qcow2 } else { DiskFormat::Raw };
            disks.push(options);
        }
        None => {}
    }
    if setup.has_passt {
        processes.push(BackEnd::start_network()?);
    }
    let config = MachineConfig {
        vcpus,
        ram_bytes: setup.ram_bytes(),
        dirty_ring_size,
        incoming: guest.is_none(),
        entropy: setup.has_root || setup.disk.is_some(),
        disks,
        nets: tap.clone().map(card).into_iter().collect(),
        vhost_user: processes.iter().enumerate().map(|(index, process)| process.options(index)).collect(),
        virtio_console: setup.has_console,
        free_page_reporting: setup.reports,
        free_page_hinting: setup.hints,
        guest,
        serial: Box::new(console.clone()),
        ..MachineConfig::new("linux")
    };
    let machine = KvmMachine::new(config).map_err(said)?;
    tap.map_or(Ok(()), |tap| network::join(&tap))?;
    Ok(Place { machine, _processes: processes })
}

/// A disk's file, removed when the last user drops it.
pub(super) type Image = Arc<tempfile::TempPath>;

/// Makes a disk of zeros.
pub(super) fn disk_image(setup: &Setup) -> Result<Image, Failure> {
    let file = tempfile::NamedTempFile::new().map_err(said)?;
    file.as_file().set_len(DISK_BYTES).map_err(said)?;
    let path = file.into_temp_path();
    if setup.is_qcow2 {
        output(
            Command::new("qemu-img").args(["create", "-f", "qcow2"]).arg(&path).arg(DISK_BYTES.to_string()),
        )?;
    }
    Ok(Arc::new(path))
}

/// Checks that disk from outside, after the guest has ended. Each block must have the content of its last
/// write.
pub(super) fn check_disk(setup: &Setup, disk: &Path, steps: u64) -> Result<(), Failure> {
    if !setup.is_qcow2 {
        return guest::disk::check(disk, steps);
    }
    output(Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(disk))?;
    let raw = tempfile::NamedTempFile::new().map_err(said)?;
    output(Command::new("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw"]).arg(disk).arg(raw.path()))?;
    guest::disk::check(raw.path(), steps)
}
