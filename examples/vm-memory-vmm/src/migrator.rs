//! An operator's commands for migrations, saves and restores.

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use sterna::{
    Address, Arrival, Capabilities, Event, Incoming, Migration, Observer, Parameters, SettingLimits,
    SharedSettings, TargetVm, VmError,
};

use crate::disk::Disk;
use crate::machine::Machine;
use crate::migratable::Migratable;

type Done = Result<(), Box<dyn Error>>;

/// The migrations of one machine.
pub struct Migrator {
    vm: Arc<Migratable>,
    parameters: Parameters,
    /// The last outgoing migration.
    outgoing: Option<Migration>,
    /// The incoming migration. It is kept, because a source that lost the acknowledgement asks it for the
    /// guest's fate.
    incoming: Option<Incoming>,
}

impl Migrator {
    /// A migrator without a migration so far.
    pub fn new(machine: Arc<Machine>, disk: Option<Arc<Disk>>) -> Result<Self, Box<dyn Error>> {
        let vm = Arc::new(Migratable::new(machine, disk)?);
        Ok(Self { vm, parameters: Parameters::default(), outgoing: None, incoming: None })
    }

    /// Waits at `address` for a source, whose configuration says how to make the machine. Returns when it is made.
    pub fn from_source(
        address: &str,
        disk: Option<Arc<Disk>>,
    ) -> Result<(Arc<Machine>, Self), Box<dyn Error>> {
        let (made, is_made) = mpsc::channel();
        let make = move |configuration: &[u8]| -> Result<Arc<dyn TargetVm>, VmError> {
            let vm = Migratable::from_configuration(configuration, disk);
            let vm = Arc::new(vm.map_err(|error| VmError::new("make the machine", error))?);
            let _ = made.send(vm.clone());
            Ok(vm)
        };
        let limits = SettingLimits { multifd_channels: 8, ..SettingLimits::default() };
        let settings = SharedSettings::AsSource(limits);
        let (parameters, at) = (Parameters::default(), address.parse()?);
        let observer = tell("incoming");
        let incoming = Incoming::listen_with(
            &at,
            parameters.clone(),
            Capabilities::default(),
            settings,
            observer,
            make,
        )?;
        let Ok(vm) = is_made.recv() else { return Err(format!("no machine: {:?}", incoming.wait()).into()) };
        wait_until_claimed(&incoming)?;
        let machine = vm.machine().clone();
        Ok((machine, Self { vm, parameters, outgoing: None, incoming: Some(incoming) }))
    }

    /// Waits for a guest at `address`. The guest starts by itself after its arrival.
    pub fn listen(&mut self, address: &str) -> Done {
        self.receive(&address.parse()?, Capabilities::default())
    }

    /// Restores the guest from a file.
    pub fn restore(&mut self, file: &Path) -> Done {
        self.receive(&at_file(file), for_file())
    }

    /// Starts a migration of the guest to `address`, and returns.
    pub fn migrate(&mut self, address: &str) -> Done {
        self.send(&address.parse()?, Capabilities::default())
    }

    /// Starts to save the guest to a file, and returns. The guest is stopped until [`Migrator::resume`].
    pub fn save(&mut self, file: &Path) -> Done {
        self.send(&at_file(file), for_file())
    }

    /// Cancels a migration; the guest continues here.
    pub fn cancel(&self) -> Done {
        Ok(self.outgoing.as_ref().ok_or("nothing was migrated")?.cancel()?)
    }

    /// Resumes a guest that was saved.
    pub fn resume(&self) -> Done {
        let migration = self.outgoing.as_ref().filter(|migration| migration.is_saved());
        Ok(migration.ok_or("the guest is not stopped by a completed save")?.resume_saved()?)
    }

    /// Limits the bandwidth of this and later migrations, in bytes per second; 0 is no limit.
    pub fn limit(&mut self, bytes_per_second: u64) -> Done {
        self.parameters.max_bandwidth_bytes = bytes_per_second;
        let running = self.outgoing.iter().filter(|migration| !migration.status().is_terminal());
        for migration in running {
            migration.set_live(|parameters| parameters.max_bandwidth_bytes = bytes_per_second)?;
        }
        Ok(())
    }

    /// Plugs memory into the guest, between migrations. A destination must plug before it listens.
    pub fn plug(&self, bytes: usize) -> Done {
        self.vm.plug(bytes)
    }

    /// The states of the migrations in one line.
    pub fn status(&self) -> String {
        let outgoing = self.outgoing.as_ref().map(Migration::status).unwrap_or_default();
        let incoming = self.incoming.as_ref().map(Incoming::status).unwrap_or_default();
        format!("outgoing {outgoing} incoming {incoming}")
    }

    /// Whether the process may end: no migration runs, or waits for an answer or a decision.
    pub fn is_idle(&self) -> bool {
        self.outgoing.as_ref().is_none_or(|migration| migration.status().is_terminal())
    }

    fn send(&mut self, to: &Address, capabilities: Capabilities) -> Done {
        let parameters = self.parameters.clone();
        self.outgoing =
            Some(Migration::start(self.vm.clone(), to, parameters, capabilities, tell("outgoing"))?);
        Ok(())
    }

    fn receive(&mut self, at: &Address, capabilities: Capabilities) -> Done {
        let parameters = self.parameters.clone();
        self.incoming =
            Some(Incoming::listen(self.vm.clone(), at, parameters, capabilities, tell("incoming"))?);
        Ok(())
    }
}

/// Waits until the engine has claimed the new machine. Before that, an operator's command could start the empty machine
/// while the source's guest arrives in it.
fn wait_until_claimed(incoming: &Incoming) -> Done {
    while incoming.settings().is_none() {
        // A small guest may be claimed and complete within this wait.
        if let Some(Arrival::Failed(error)) = incoming.wait_timeout(Duration::from_millis(5)) {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Capabilities for a mapped-ram file, in which pages can be restored in parallel.
fn for_file() -> Capabilities {
    Capabilities { mapped_ram: true, ..Capabilities::default() }
}

fn at_file(path: &Path) -> Address {
    Address::File { path: path.into(), offset: 0 }
}

/// Prints the engine's events. The engine's threads call it, so it must return soon.
fn tell(which: &'static str) -> Arc<dyn Observer> {
    Arc::new(move |event: &Event| println!("{which}: {event:?}"))
}

#[cfg(test)]
#[path = "../tests/unit/claimed.rs"]
mod tests;
