//! Starts stopped machines of QEMU and Sterna with the same RAM. They have no unrequested devices.

use std::path::{Path, PathBuf};
use std::process::Command;

use sterna_interop::{Accelerator, Builder, Guest, Qemu, Root};
use tempfile::TempDir;

use crate::Failure;
use crate::peer::Peer;

/// A size that every disk controller accepts.
const DISK_BYTES: u64 = 1 << 20;

/// The program that runs a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The QEMU of the root.
    Qemu,
    /// The command `sterna run`.
    Sterna,
}

impl Side {
    /// Name of the program in tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::Sterna => "Sterna",
        }
    }
}

/// The part that a machine plays in a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It has the guest, and its RAM is allocated.
    Source,
    /// It has the guest; its RAM is allocated when it is touched.
    SparseSource,
    /// Its RAM is allocated before the migration, as a source's is (`prealloc=on`, `--prealloc`).
    Destination,
    /// Its RAM is allocated when pages arrive.
    FreshDestination,
}

impl Role {
    fn is_allocated(self) -> bool {
        matches!(self, Self::Source | Self::Destination)
    }

    fn waits(self) -> bool {
        matches!(self, Self::Destination | Self::FreshDestination)
    }
}

/// Programs and settings for making machines.
pub struct Lab {
    /// Directory of QEMU. `None`: its rows are skipped.
    pub root: Option<Root>,
    /// The `sterna` command.
    pub sterna: PathBuf,
    /// Whether machines run on KVM.
    pub kvm: bool,
    /// The network namespace in which machines run. `None`: this process's own.
    pub namespace: Option<String>,
}

impl Lab {
    /// A stopped machine with `bytes` of RAM in memory files, without a guest program.
    pub fn start(&self, side: Side, role: Role, bytes: u64) -> Result<Peer, Failure> {
        self.start_with(side, role, bytes, None)
    }

    /// Like [`start`](Self::start), but on KVM with the boot sector that writes its memory.
    pub fn start_writer(&self, side: Side, role: Role, bytes: u64, sector: &Path) -> Result<Peer, Failure> {
        self.start_with(side, role, bytes, Some(sector))
    }

    /// Writes the boot sector for [`start_writer`](Self::start_writer) to `file`.
    pub fn boot_sector(&self, bytes: u64, file: &Path) -> Result<(), Failure> {
        self.boot_sector_of(Guest::Boot, bytes, file)
    }

    /// Like [`boot_sector`](Self::boot_sector), for another guest that is a boot sector.
    pub fn boot_sector_of(&self, guest: Guest, bytes: u64, file: &Path) -> Result<(), Failure> {
        let place = directory()?;
        self.builder(bytes)?.guest(guest).command_in(place.path())?;
        let image =
            std::fs::read(place.path().join("boot.img")).map_err(|error| format!("boot.img: {error}"))?;
        let sector = image.get(..512).ok_or("the boot sector is too short")?;
        std::fs::write(file, sector).map_err(|error| format!("{}: {error}", file.display()))
    }

    /// A stopped VM of Sterna on KVM, with the boot sector that writes its memory. `more` is added to the
    /// arguments of `sterna run`.
    pub fn start_protected(
        &self,
        role: Role,
        bytes: u64,
        sector: &Path,
        more: &[String],
    ) -> Result<Peer, Failure> {
        let place = directory()?;
        let mut command = self.sterna_vm(role, bytes, Some(sector), place.path());
        command.args(more);
        Peer::start("Sterna", self.in_namespace(command), place)
    }

    /// A stopped machine on KVM with that guest. The guest is a boot sector built for `sector_bytes` of RAM.
    pub fn start_guest(
        &self,
        side: Side,
        role: Role,
        bytes: u64,
        (guest, sector_bytes): (Guest, u64),
    ) -> Result<Peer, Failure> {
        let place = directory()?;
        let command = match side {
            Side::Qemu => {
                // The builder would build the guest for all of the RAM.
                let disk = place.path().join("boot.disk");
                self.boot_sector_of(guest, sector_bytes, &disk)?;
                let file = std::fs::OpenOptions::new().write(true).open(&disk);
                file.and_then(|file| file.set_len(DISK_BYTES))
                    .map_err(|error| format!("{}: {error}", disk.display()))?;
                let drive = format!("file={},format=raw,if=none,id=boot", disk.display());
                let devices = ["-drive", &drive, "-device", "ide-hd,drive=boot,bootindex=0"];
                self.qemu_builder(role, bytes)?.args(&devices).command_in(place.path())?
            }
            Side::Sterna => {
                let sector = place.path().join("sector");
                self.boot_sector_of(guest, sector_bytes, &sector)?;
                self.sterna_vm(role, bytes, Some(&sector), place.path())
            }
        };
        Peer::start(side.word(), self.in_namespace(command), place)
    }

    fn start_with(&self, side: Side, role: Role, bytes: u64, sector: Option<&Path>) -> Result<Peer, Failure> {
        let place = directory()?;
        let command = match side {
            Side::Qemu => self.qemu(role, bytes, sector.is_some(), place.path())?,
            Side::Sterna => self.sterna_vm(role, bytes, sector, place.path()),
        };
        Peer::start(side.word(), self.in_namespace(command), place)
    }

    /// A running VM of Sterna, with the guest that `arguments` of `sterna run` describe.
    pub fn start_tide(&self, arguments: Vec<String>) -> Result<Peer, Failure> {
        let place = directory()?;
        let mut command = Command::new(&self.sterna);
        command.args(["run", "--backing=memfd"]).args(arguments);
        command.arg(format!("--qmp=unix:{}", place.path().join("qmp").display()));
        command.arg(format!("--exit-with-parent={}", std::process::id()));
        Peer::start("Sterna", self.in_namespace(command), place)
    }

    /// `ip` executes the program in its own process, so the process number stays the same.
    fn in_namespace(&self, command: Command) -> Command {
        let Some(name) = &self.namespace else { return command };
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", name]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }

    fn builder(&self, bytes: u64) -> Result<Builder, Failure> {
        let root = self.root.as_ref().ok_or("there is no QEMU")?;
        let accelerator = if self.kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        Ok(Qemu::builder(root).accelerator(accelerator).memory_mib(bytes >> 20).arg("-S"))
    }

    fn qemu(&self, role: Role, bytes: u64, writes: bool, place: &Path) -> Result<Command, Failure> {
        let mut builder = self.qemu_builder(role, bytes)?;
        if writes {
            builder = builder.guest(Guest::Boot);
        }
        builder.command_in(place)
    }

    fn qemu_builder(&self, role: Role, bytes: u64) -> Result<Builder, Failure> {
        // `Ram::Memfd` has no setting for `prealloc`.
        let prealloc = if role.is_allocated() { "on" } else { "off" };
        let memory = format!("memory-backend-memfd,id=ram0,share=on,prealloc={prealloc},size={bytes}");
        let mut builder = self.builder(bytes)?.machine("pc,memory-backend=ram0").args(&["-object", &memory]);
        if role.waits() {
            builder = builder.incoming_defer();
        }
        Ok(builder)
    }

    fn sterna_vm(&self, role: Role, bytes: u64, sector: Option<&Path>, place: &Path) -> Command {
        let mut command = Command::new(&self.sterna);
        command.args(["run", "--stopped", "--fill=zero", "--backing=memfd"]);
        command.arg(format!("--machine={}", if self.kvm { "kvm" } else { "process" }));
        command.arg(format!("--ram={bytes}b"));
        command.arg(format!("--qmp=unix:{}", place.join("qmp").display()));
        command.arg(format!("--serial={}", place.join("serial").display()));
        command.arg(format!("--exit-with-parent={}", std::process::id()));
        if let Some(sector) = sector {
            command.arg(format!("--guest=boot-sector:{}", sector.display()));
        }
        if role.is_allocated() {
            command.arg("--prealloc");
        }
        if role.waits() {
            command.arg("--incoming=defer");
        }
        command
    }
}

fn directory() -> Result<TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
    made.map_err(|error| format!("no temporary directory: {error}"))
}
