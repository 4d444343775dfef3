//! A small VMM of rust-vmm crates (`vm-memory`, `kvm-ioctls`, `kvm-bindings`, `vmm-sys-util`) that migrates
//! with Sterna.
//!
//! | module | contains | names `sterna` |
//! | --- | --- | --- |
//! | `machine` | guest memory, KVM's slots, the guest's code | no |
//! | `vcpu` | the vCPU's thread | no |
//! | `ticker` | a device that writes guest memory | no |
//! | `disk` | the lock of a disk | no |
//! | `control` | the control socket and the event loop | no |
//! | `migratable` | the machine's implementation of `Vm`, `SourceVm`, `TargetVm`, `Device`, `Hook` | yes |
//! | `migrator` | an operator's commands: migrate, cancel, save, receive, restore | yes |
//!
//! [`control`] describes the commands of the control socket. `docs/embedding.md` explains how to do the
//! same in another VMM.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

mod control;
mod disk;
mod machine;
mod migratable;
mod migrator;
mod ticker;
mod vcpu;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use disk::Disk;
use machine::Machine;
use migrator::Migrator;

const USAGE: &str = "usage: vm-memory-vmm --control SOCKET [--memory MIB] [--disk FILE] \
                     [--incoming ADDRESS|defer | --from-source ADDRESS | --restore FILE]";

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let disk = options.disk.as_deref().map(Disk::open).transpose()?.map(Arc::new);
    if let Some(address) = &options.from_source {
        // Without a machine there is nothing to serve, so this waits for the source.
        let (machine, mut migrator) = Migrator::from_source(address, disk)?;
        return control::run(&options.control, &machine, &mut migrator);
    }
    let machine = Arc::new(Machine::new(options.memory_mib << 20)?);
    let mut migrator = Migrator::new(machine.clone(), disk.clone())?;
    // The control socket is created last, so that a client that finds it finds a complete VMM.
    match (&options.incoming, &options.restore) {
        (Some(address), None) if address == "defer" => {} // The `listen` command follows.
        (Some(address), None) => migrator.listen(address)?,
        (None, Some(file)) => migrator.restore(file)?,
        (None, None) => {
            disk.iter().try_for_each(|disk| disk.lock())?;
            machine.boot()?;
        }
        (Some(_), Some(_)) => return Err(USAGE.into()),
    }
    control::run(&options.control, &machine, &mut migrator)
}

struct Options {
    control: PathBuf,
    memory_mib: usize,
    disk: Option<PathBuf>,
    incoming: Option<String>,
    from_source: Option<String>,
    restore: Option<PathBuf>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut control = None;
        let mut options = Self {
            control: PathBuf::new(),
            memory_mib: 64,
            disk: None,
            incoming: None,
            from_source: None,
            restore: None,
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or(USAGE)?;
            match name.as_str() {
                "--control" => control = Some(value.into()),
                "--memory" => options.memory_mib = value.parse()?,
                "--disk" => options.disk = Some(value.into()),
                "--incoming" => options.incoming = Some(value),
                "--from-source" => options.from_source = Some(value),
                "--restore" => options.restore = Some(value.into()),
                _ => return Err(USAGE.into()),
            }
        }
        options.control = control.ok_or(USAGE)?;
        Ok(options)
    }
}
