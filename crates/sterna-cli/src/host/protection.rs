//! The parts of a hosted VM that make it a primary or a standby.
//! They are the arbiter, the secret, the lease, the watchdog and the gate of the console.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_arbiter::{DEFAULT_LIMIT, Opened, Role, Spec};
use sterna_qmp::migration::{ProtectionMeans, Side};
use sterna_standby::{ByteGate, EpochGate, JoinedGate, Secret, Terms, Watchdog};
use sterna_vmm::{DiskMigration, MachineConfig, VhostUserOptions};

use crate::claims::claims;
use crate::exit::Stop;

/// Most bytes of console output that wait for a checkpoint. At this limit, the guest blocks.
const CONSOLE_LIMIT: u64 = 1 << 20;
/// How long the end of the VM waits for output of the console.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The means of a protection: the arbiter, its times, and the gate of the console.
pub struct Protection {
    opened: Opened,
    /// The arbiter's name on the command line.
    arbiter: String,
    secret: Secret,
    terms: Terms,
    is_insecure: bool,
    unheld: Vec<String>,
    console: Console,
    watchdog: Option<Arc<dyn Watchdog>>,
}

/// The guest's console. While the guest is protected, output waits for its checkpoint. A clone writes to the
/// same console.
#[derive(Clone)]
pub struct Console(Arc<ByteGate>);

impl Console {
    /// A console whose released output goes to `writer`.
    pub fn new(mut writer: Box<dyn Write + Send>) -> Result<Self, Stop> {
        let write = move |bytes: &[u8]| {
            // Write errors are ignored, so that the guest continues to run when the console's reader is gone.
            let _ = writer.write_all(bytes).and_then(|()| writer.flush());
        };
        let gate = ByteGate::new(CONSOLE_LIMIT, write).map_err(|error| Stop::failed(error.to_string()))?;
        Ok(Self(Arc::new(gate)))
    }

    /// The gate that the console writes to.
    pub(super) fn gate(&self) -> Arc<ByteGate> {
        Arc::clone(&self.0)
    }

    /// Waits until released output is written, at most 1 s.
    pub fn finish(&self) {
        self.0.wait_until_empty(LAST_WORDS);
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Protection {
    /// The means with the arbiter of `spec`, for `machine`.
    pub fn new(
        spec: &Spec,
        secret: Option<Secret>,
        lease: Duration,
        is_insecure: bool,
        machine: &MachineConfig,
        console: Console,
    ) -> Result<Self, Stop> {
        let opened = spec.open(DEFAULT_LIMIT).map_err(|error| Stop::usage(format!("--arbiter: {error}")))?;
        let terms = Terms { lease, ..Terms::default() };
        terms.check().map_err(|error| Stop::usage(format!("--lease: {error}")))?;
        Ok(Self {
            opened,
            arbiter: spec.to_string(),
            // Without a secret, the peer is on this host, or TLS authenticates it.
            secret: secret.unwrap_or_else(|| Secret::from_bytes([0; 32])),
            terms,
            is_insecure,
            unheld: unheld(machine),
            console,
            watchdog: None,
        })
    }

    /// Adds a watchdog that guards the lease.
    pub fn with_watchdog(self, watchdog: Option<Arc<dyn Watchdog>>) -> Self {
        Self { watchdog, ..self }
    }

    /// The means for a machine whose packets `packets` holds.
    pub(super) fn means(&self, packets: Option<Arc<dyn EpochGate>>) -> Option<ProtectionMeans> {
        let (arbiter, name) = (Arc::clone(&self.opened.arbiter), self.arbiter.clone());
        let console = Arc::clone(&self.console.0);
        let decide = self.opened.operator.clone().map(|operator| {
            let decide = move |has_won| operator.decide(has_won).map(drop).map_err(|error| error.to_string());
            Arc::new(decide) as sterna_qmp::migration::Decide
        });
        Some(ProtectionMeans {
            secret: self.secret.clone(),
            is_insecure: self.is_insecure,
            terms: self.terms,
            claims: Arc::new(move |side, protection| {
                let role = match side {
                    Side::Primary => Role::Primary,
                    Side::Standby => Role::Standby,
                };
                claims(&name, &arbiter, role, protection)
            }),
            gate: Arc::new(JoinedGate::new(self.console.0.clone(), packets.into_iter().collect())),
            say_again: Arc::new(move |position, bytes| console.say_again(position, bytes)),
            unheld: self.unheld.clone(),
            decide,
            watchdog: self.watchdog.clone(),
        })
    }
}

/// Reasons why a guest of this machine cannot be protected.
fn unheld(machine: &MachineConfig) -> Vec<String> {
    let disks = machine.disks.iter().filter_map(|disk| {
        let path = disk.path.display();
        match disk.migration {
            DiskMigration::Copy => None,
            DiskMigration::None if disk.is_read_only => None,
            DiskMigration::None => Some(format!(
                "the guest's writes to the disk {path} (migrate=none) are not part of the checkpoints: use \
                 migrate=copy or read-only=on"
            )),
            _ => Some(format!(
                "both sides use the disk {path} (migrate=shared), and a write reaches it before the standby has the \
                 checkpoint: use migrate=copy, with a separate file at each side"
            )),
        }
    });
    disks.chain(in_other_processes(&machine.vfio_user, &machine.vhost_user)).collect()
}

fn in_other_processes(
    vfio_user: &[PathBuf],
    vhost_user: &[VhostUserOptions],
) -> impl Iterator<Item = String> {
    let sockets = vfio_user.iter().cloned().chain(vhost_user.iter().map(|device| device.socket.clone()));
    sockets.map(|socket| {
        format!(
            "the output of the device at {} cannot be delayed until the standby has the checkpoint: start the guest \
             without this device",
            socket.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_of_another_process_cannot_be_held_back() {
        let vhost = crate::vhost_user::parse("/run/disk,kind=blk").unwrap();

        let unheld: Vec<_> = in_other_processes(&["/run/card".into()], &[vhost.options(0)]).collect();

        assert_eq!(unheld.len(), 2);
        for (why, socket) in unheld.iter().zip(["/run/card", "/run/disk"]) {
            assert!(
                why.contains(socket)
                    && why.contains("cannot be delayed until the standby has the checkpoint"),
                "{why}"
            );
        }
    }
}
