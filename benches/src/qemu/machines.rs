//! How the machines of both kinds are started: the same RAM, no devices that nobody asked for, stopped.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;

use sterna_interop::{Accelerator, Builder, Guest, Qemu, Root};
use tempfile::TempDir;

use crate::Failure;
use crate::content::Content;
use crate::peer::Peer;

/// Whose machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Qemu,
    Sterna,
}

/// Which part of a migration a machine plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Source,
    /// Its RAM is allocated before anything comes, as a source's is (`prealloc=on`, `--prealloc`).
    Destination,
    /// Its RAM is allocated as pages come.
    FreshDestination,
}

/// What machines are made with.
pub struct Lab {
    pub root: Option<Root>,
    pub sterna: PathBuf,
    pub kvm: bool,
}

impl Lab {
    /// A stopped machine with that much RAM in memory files, running nothing.
    pub fn start(&self, side: Side, role: Role, bytes: u64) -> Result<Peer, Failure> {
        self.start_with(side, role, bytes, None)
    }

    /// As [`start`](Self::start), but with the boot sector that writes its memory, on KVM.
    pub fn start_writer(&self, side: Side, role: Role, bytes: u64, sector: &Path) -> Result<Peer, Failure> {
        self.start_with(side, role, bytes, Some(sector))
    }

    /// The boot sector that [`start_writer`](Self::start_writer) takes, written to `file`.
    pub fn boot_sector(&self, bytes: u64, file: &Path) -> Result<(), Failure> {
        let place = directory()?;
        self.builder(bytes)?.guest(Guest::Boot).command_in(place.path())?;
        let image =
            std::fs::read(place.path().join("boot.img")).map_err(|error| format!("boot.img: {error}"))?;
        let sector = image.get(..512).ok_or("the boot sector is too short")?;
        std::fs::write(file, sector).map_err(|error| format!("{}: {error}", file.display()))
    }

    fn start_with(&self, side: Side, role: Role, bytes: u64, sector: Option<&Path>) -> Result<Peer, Failure> {
        let place = directory()?;
        let (name, command) = match side {
            Side::Qemu => ("QEMU", self.qemu(role, bytes, sector.is_some(), place.path())?),
            Side::Sterna => ("Sterna", self.sterna_vm(role, bytes, sector, place.path())),
        };
        Peer::start(name, command, place)
    }

    fn builder(&self, bytes: u64) -> Result<Builder, Failure> {
        let root = self.root.as_ref().ok_or("there is no QEMU")?;
        let accelerator = if self.kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        Ok(Qemu::builder(root).accelerator(accelerator).memory_mib(bytes >> 20).arg("-S"))
    }

    fn qemu(&self, role: Role, bytes: u64, writes: bool, place: &Path) -> Result<Command, Failure> {
        // `Ram::Memfd` would do, but for prealloc.
        let prealloc = if role == Role::FreshDestination { "off" } else { "on" };
        let memory = format!("memory-backend-memfd,id=ram0,share=on,prealloc={prealloc},size={bytes}");
        let mut builder = self.builder(bytes)?.machine("pc,memory-backend=ram0").args(&["-object", &memory]);
        if writes {
            builder = builder.guest(Guest::Boot);
        }
        if role != Role::Source {
            builder = builder.incoming_defer();
        }
        builder.command_in(place)
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
        if role != Role::FreshDestination {
            command.arg("--prealloc");
        }
        if role != Role::Source {
            command.arg("--incoming=defer");
        }
        command
    }
}

/// Machines of one side with one content. Who arrives is the next source, so that RAM is filled once.
pub struct Chain<'a> {
    pub lab: &'a Lab,
    pub side: Side,
    pub content: &'a Content,
    /// Whether there is memory for a machine of each side besides those that are timed.
    keeps: bool,
    ready: RefCell<Option<Peer>>,
}

impl<'a> Chain<'a> {
    pub fn new(lab: &'a Lab, side: Side, content: &'a Content) -> Self {
        Self { lab, side, content, keeps: may_keep(content.bytes), ready: RefCell::new(None) }
    }

    /// A stopped machine that holds the content.
    pub fn source(&self) -> Result<Peer, Failure> {
        if let Some(peer) = self.ready.borrow_mut().take() {
            return Ok(peer);
        }
        let peer = self.lab.start(self.side, Role::Source, self.content.bytes)?;
        self.content.put(&peer.ram()?)?;
        Ok(peer)
    }

    /// A machine that waits.
    pub fn destination(&self, role: Role) -> Result<Peer, Failure> {
        self.lab.start(self.side, role, self.content.bytes)
    }

    /// Takes over a machine to which the content has come; looks first whether it has, if `check`.
    pub fn arrived(&self, peer: Peer, check: bool) -> Result<(), Failure> {
        if check {
            self.content.check(&peer.ram()?)?;
        }
        *self.ready.borrow_mut() = self.keeps.then_some(peer);
        Ok(())
    }
}

/// Two machines that wait, one that comes up, an image on a tmpfs, and something for the rest.
fn may_keep(bytes: u64) -> bool {
    let about = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = about.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<u64> = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.is_some_and(|kib| 6 * bytes < kib * 1024)
}

fn directory() -> Result<TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
    made.map_err(|error| format!("no temporary directory: {error}"))
}
