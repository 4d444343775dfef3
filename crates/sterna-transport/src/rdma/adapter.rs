//! An RDMA device, one of its ports, and the protection domain for registered memory.

use std::fmt::{self, Debug};
use std::net::IpAddr;

use super::error::RdmaError;
use super::memory::{Access, Memory, Registration};

/// A device with its protection domain, through one of its ports.
pub trait Adapter: Debug + Send + Sync {
    /// The port's present state and limits, because state and MTU can change. Slow: it looks up addresses in sysfs.
    fn info(&self) -> AdapterInfo;

    /// Only [`AdapterInfo::max_message_bytes`], without the slow lookup.
    fn max_message_bytes(&self) -> u32;

    /// Only [`AdapterInfo::on_demand_paging`], without the slow lookup.
    fn has_on_demand_paging(&self) -> bool;

    /// The memory that this process may pin and has pinned now.
    fn locked_memory(&self) -> LockedMemory;

    /// Registers memory: pins its present pages, and assigns their keys.
    ///
    /// Work requests use the local key, and the peer uses the remote key.
    ///
    /// Untouched memory is populated, whatever `access` is, unless it is [`Access::on_demand`]. Until the
    /// registration is dropped, no code may discard or replace its pages, because the adapter would continue to
    /// use the old ones.
    ///
    /// # Errors
    /// [`RdmaError::LockedMemory`], [`RdmaError::Registration`].
    fn register(&self, memory: Memory, access: Access) -> Result<Registration, RdmaError>;
}

/// State and limits of one port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdapterInfo {
    /// Name of the device, for example `mlx5_0`.
    pub device: String,
    /// Number of the port; the first is 1.
    pub port: u8,
    /// Whether the port has a link and is ready.
    pub state: PortState,
    /// IP addresses of the network interface over the port.
    pub addresses: Vec<IpAddr>,
    /// Maximum payload bytes of one packet.
    pub active_mtu: u32,
    /// Maximum bytes of one message.
    pub max_message_bytes: u32,
    /// Maximum bytes of one registration.
    pub max_registration_bytes: u64,
    /// Maximum number of work requests in a queue.
    pub max_work_requests: u32,
    /// Maximum number of entries in a completion queue.
    pub max_completions: u32,
    /// Whether memory can be registered without pinning ([`Access::on_demand`]). It holds for sources and for
    /// targets of writes.
    pub on_demand_paging: bool,
}

impl AdapterInfo {
    /// A port that is down, without addresses, and with limits of 0.
    pub fn new(device: impl Into<String>, port: u8) -> Self {
        Self {
            device: device.into(),
            port,
            state: PortState::Down,
            addresses: Vec::new(),
            active_mtu: 0,
            max_message_bytes: 0,
            max_registration_bytes: 0,
            max_work_requests: 0,
            max_completions: 0,
            on_demand_paging: false,
        }
    }
}

/// Whether a port can carry connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// The port has no link.
    Down,
    /// The port has a link but is not ready. InfiniBand: no subnet manager has configured it.
    Initialising,
    /// The port is ready for connections.
    Active,
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PortState::Down => "down",
            PortState::Initialising => "initialising",
            PortState::Active => "active",
        })
    }
}

/// The memory that the process may pin (RLIMIT_MEMLOCK), and has pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockedMemory {
    /// The limit in bytes. `None` means no limit, also for a process with CAP_IPC_LOCK.
    pub limit_bytes: Option<u64>,
    /// Bytes that are pinned at present.
    pub pinned_bytes: u64,
}

impl LockedMemory {
    /// Whether `bytes` more can be pinned within the limit.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.limit_bytes.is_none_or(|limit| self.pinned_bytes.saturating_add(bytes) <= limit)
    }
}
