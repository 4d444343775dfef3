//! A device, one of its ports, and the protection domain over it.

use std::fmt::{self, Debug};
use std::net::IpAddr;

use super::{Access, Memory, RdmaError, Registration};

/// A device with its protection domain.
pub trait Adapter: Debug + Send + Sync {
    /// The port as it is now: its state and MTU may change. Its addresses are looked up in sysfs, which takes long.
    fn info(&self) -> AdapterInfo;

    /// [`AdapterInfo::max_message_bytes`] alone, which is cheap.
    fn max_message_bytes(&self) -> u32;

    /// [`AdapterInfo::on_demand_paging`] alone, which is cheap.
    fn has_on_demand_paging(&self) -> bool;

    /// How much memory this process may pin, as it is now.
    fn locked_memory(&self) -> LockedMemory;

    /// Registers memory: pins its pages as they are now, and gives the keys under which work requests and the peer name
    /// it. Memory that was never touched is populated by this, whatever `access` is, unless it is [`Access::on_demand`].
    /// Until the registration is dropped, nobody may discard or replace pages of it: the adapter would go on using the
    /// old ones.
    ///
    /// # Errors
    /// [`RdmaError::LockedMemory`], [`RdmaError::Registration`].
    fn register(&self, memory: Memory, access: Access) -> Result<Registration, RdmaError>;
}

/// One port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdapterInfo {
    /// The device's name, for example `mlx5_0`.
    pub device: String,
    /// The port's number, from 1 on.
    pub port: u8,
    /// Whether it has a link.
    pub state: PortState,
    /// Addresses of its network interface.
    pub addresses: Vec<IpAddr>,
    /// Payload bytes of one packet.
    pub active_mtu: u32,
    /// The longest message.
    pub max_message_bytes: u32,
    /// The largest registration.
    pub max_registration_bytes: u64,
    /// The most work requests that a queue holds.
    pub max_work_requests: u32,
    /// The most entries that a completion queue holds.
    pub max_completions: u32,
    /// Whether memory can be registered without pinning it ([`Access::on_demand`]), as a target of writes and a source.
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

/// The state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// A link, but not ready yet (InfiniBand: no subnet manager has come).
    Initialising,
    /// Ready.
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

/// How much memory the process may pin (RLIMIT_MEMLOCK).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockedMemory {
    /// The limit in bytes; `None` for no limit, also for a process that the limit does not bind (CAP_IPC_LOCK).
    pub limit_bytes: Option<u64>,
    /// Bytes that are pinned now.
    pub pinned_bytes: u64,
}

impl LockedMemory {
    /// Whether `bytes` more may be pinned.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.limit_bytes.is_none_or(|limit| self.pinned_bytes.saturating_add(bytes) <= limit)
    }
}
