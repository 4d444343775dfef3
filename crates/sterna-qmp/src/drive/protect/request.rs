//! What is asked for.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use sterna::replica::{Protection, Secret, Terms};
use sterna_transport::{Address, Tls};

use crate::drive::error::DriveError;

/// The least time from checkpoint to checkpoint. At 0 QEMU's main loop spins, and no checkpoint ends.
const LEAST_DELAY: Duration = Duration::from_millis(10);
/// The greatest.
const MOST_DELAY: Duration = Duration::from_millis(u32::MAX as u64);

/// How a QEMU's guest is to be protected.
pub struct ProtectRequest {
    /// Where the standby takes the stream.
    pub standby: Address,
    /// Where the standby takes the contact, if that is another address.
    pub contact: Option<Address>,
    /// TLS to the standby, on both.
    pub tls: Option<Tls>,
    /// What both sides know.
    pub secret: Secret,
    /// Names this protection.
    pub protection: Protection,
    /// Its times.
    pub terms: Terms,
    /// From checkpoint to checkpoint.
    pub checkpoint_delay: Duration,
    /// Multifd channels; 0: the main channel alone.
    pub channels: u8,
    /// Most bytes of output that wait at each network card; more is dropped, as a network may do.
    pub most_waiting_bytes: u64,
    /// Where the directory of the sockets between QEMU and this program is made; none: where temporary files are.
    pub socket_directory: Option<PathBuf>,
    /// Further migration parameters, under QEMU's names.
    pub parameters: Map<String, Value>,
    /// Disks that are written at the standby, too.
    pub disks: Vec<ProtectedDisk>,
    /// Hears how far the disks were copied, some times a second. False: the operator has cancelled.
    pub copying: Option<Arc<dyn Fn(DiskCopy) -> bool + Send + Sync>>,
}

/// A disk of the guest's that goes to the standby.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtectedDisk {
    /// QEMU's block node, a quorum.
    pub node: String,
    /// The standby's name for it.
    pub export: String,
}

/// How far disks were copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCopy {
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Bytes that are to be copied; it grows while the guest writes.
    pub total_bytes: u64,
}

impl ProtectRequest {
    /// A protection by the standby at `standby`, with defaults for the rest.
    pub fn new(standby: Address, protection: Protection, secret: Secret) -> Self {
        Self {
            standby,
            contact: None,
            tls: None,
            secret,
            protection,
            terms: Terms::default(),
            checkpoint_delay: Duration::from_millis(50),
            channels: 0,
            most_waiting_bytes: 64 << 20,
            socket_directory: None,
            parameters: Map::new(),
            disks: Vec::new(),
            copying: None,
        }
    }

    /// Refuses what cannot work with any machine.
    pub(super) fn check(&self) -> Result<(), DriveError> {
        let Self { checkpoint_delay, .. } = self;
        if *checkpoint_delay < LEAST_DELAY || *checkpoint_delay > MOST_DELAY {
            return Err(DriveError::Request(format!(
                "a checkpoint every {} ms: the delay is at least {} ms, for QEMU stops working at 0",
                checkpoint_delay.as_millis(),
                LEAST_DELAY.as_millis()
            )));
        }
        self.terms.check().map_err(|error| DriveError::Request(error.to_string()))?;
        for address in [Some(&self.standby), self.contact.as_ref()].into_iter().flatten() {
            if !matches!(address, Address::Tcp { .. } | Address::Unix(_)) {
                return Err(DriveError::Request(format!(
                    "a standby cannot be reached at {address}: name it by tcp: or unix:"
                )));
            }
        }
        let ours = ["x-checkpoint-delay", "multifd-channels", "tls-creds", "tls-hostname", "mode"];
        if let Some(name) = ours.into_iter().find(|name| self.parameters.contains_key(*name)) {
            return Err(DriveError::Request(format!("the parameter {name} is set by the protection itself")));
        }
        Ok(())
    }
}
