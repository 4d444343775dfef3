//! The request for a protection: addresses, limits and options.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use sterna_standby::{Protection, Secret, Terms, Watchdog};
use sterna_transport::{Address, CancelFlag, Tls};

use crate::error::DriveError;

/// Minimum interval of checkpoints. With 0, QEMU's main loop spins and no checkpoint ends.
const LEAST_DELAY: Duration = Duration::from_millis(10);
/// Maximum interval of checkpoints: the largest value of QEMU's parameter.
const MOST_DELAY: Duration = Duration::from_millis(u32::MAX as u64);

/// The options of a protection of a QEMU's guest.
pub struct ProtectRequest {
    /// Address where the standby accepts the stream.
    pub standby: Address,
    /// Address where the standby accepts the contact. None: the same as `standby`.
    pub contact: Option<Address>,
    /// TLS settings for both connections to the standby.
    pub tls: Option<Tls>,
    /// The secret that both sides share.
    pub secret: Secret,
    /// The identity of this protection.
    pub protection: Protection,
    /// Lease and heartbeat times.
    pub terms: Terms,
    /// Interval of checkpoints, 10 ms to 2³² − 1 ms.
    pub checkpoint_delay: Duration,
    /// Number of multifd channels. With 0, the main channel carries everything.
    pub channels: u8,
    /// Maximum bytes of output that wait at each network card. Further packets are dropped, as a network may do.
    pub most_waiting_bytes: u64,
    /// Maximum bytes of a checkpoint that are kept in memory while the guest runs, until they are sent. With 0, the
    /// guest is paused until the standby has the checkpoint. A larger checkpoint extends the pause until the rest
    /// fits.
    pub most_kept_bytes: u64,
    /// Directory for the sockets between QEMU and this program. None: the directory of temporary files.
    pub socket_directory: Option<PathBuf>,
    /// Additional migration parameters, under QEMU's names.
    pub parameters: Map<String, Value>,
    /// Disks that QEMU also writes at the standby.
    pub disks: Vec<ProtectedDisk>,
    /// Resets this host if QEMU's guest is not stopped at the end of its lease.
    pub watchdog: Option<Arc<dyn Watchdog>>,
    /// Called several times a second with the progress of copying disks. False if the operator has cancelled.
    pub copying: Option<Arc<dyn Fn(DiskCopy) -> bool + Send + Sync>>,
    /// Cancels connecting to the standby.
    pub cancel: CancelFlag,
}

/// A disk of the guest that is also written at the standby.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtectedDisk {
    /// Node name of QEMU's quorum.
    pub node: String,
    /// Name of the disk at the standby.
    pub export: String,
}

/// Progress of copying the disks to the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCopy {
    /// Bytes that are copied.
    pub copied_bytes: u64,
    /// Bytes to copy in total. It increases while the guest writes.
    pub total_bytes: u64,
}

impl ProtectRequest {
    /// A request for a protection by the standby at `standby`, with defaults for all other options.
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
            most_kept_bytes: 256 << 20,
            socket_directory: None,
            parameters: Map::new(),
            disks: Vec::new(),
            watchdog: None,
            copying: None,
            cancel: CancelFlag::new(),
        }
    }

    /// Refuses values that are invalid for every machine.
    pub(super) fn check(&self) -> Result<(), DriveError> {
        let Self { checkpoint_delay, .. } = self;
        if *checkpoint_delay < LEAST_DELAY || *checkpoint_delay > MOST_DELAY {
            return Err(DriveError::Request(format!(
                "a checkpoint every {} ms is not possible: the delay must be at least {} ms, because QEMU stops \
                 working at 0",
                checkpoint_delay.as_millis(),
                LEAST_DELAY.as_millis()
            )));
        }
        self.terms.check().map_err(|error| DriveError::Request(error.to_string()))?;
        for address in [Some(&self.standby), self.contact.as_ref()].into_iter().flatten() {
            if !matches!(address, Address::Tcp { .. } | Address::Unix(_)) {
                return Err(DriveError::Request(format!(
                    "a standby cannot be reached at {address}: give an address with tcp: or unix:"
                )));
            }
        }
        let ours = ["x-checkpoint-delay", "multifd-channels", "tls-creds", "tls-hostname", "mode"];
        if let Some(name) = ours.into_iter().find(|name| self.parameters.contains_key(*name)) {
            return Err(DriveError::Request(format!(
                "the protection itself sets the parameter {name}: leave it out"
            )));
        }
        Ok(())
    }
}
