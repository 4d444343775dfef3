//! A report on this host's RDMA devices and missing components, for `sterna rdma`.

use std::path::Path;

use super::library::Library;
use super::locked::locked_memory;
use super::ports;
use super::sysfs::{Gid, Sysfs};
use crate::rdma::adapter::{AdapterInfo, LockedMemory, PortState};

/// Device file of the connection manager.
const MANAGER: &str = "/dev/infiniband/rdma_cm";
/// The largest packet payload of RoCE and InfiniBand, in bytes.
const BEST_MTU: u32 = 4096;

/// RDMA devices and components of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostReport {
    /// Error of loading the libraries; `None` if they are usable.
    pub library_problem: Option<String>,
    /// Whether the kernel's connection manager is available.
    pub has_connection_manager: bool,
    /// All ports of all devices that the kernel knows.
    pub ports: Vec<PortReport>,
    /// The memory that this process may pin.
    pub locked_memory: LockedMemory,
}

/// One port of a device in a [`HostReport`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortReport {
    /// State, limits and addresses. If the device cannot be opened, only the addresses are known.
    pub adapter: AdapterInfo,
    /// Whether the device could be opened.
    pub is_open: bool,
    /// The used entries of the port's table of global identifiers.
    pub gids: Vec<GidReport>,
}

/// A global identifier of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidReport {
    /// Index in the port's table.
    pub index: u32,
    /// The identifier, written as an IPv6 address. RoCE derives it from the interface's addresses.
    pub gid: String,
    /// `RoCE v2` or `IB/RoCE v1`; empty if the kernel does not report it.
    pub kind: String,
    /// Name of the network interface; empty if there is none.
    pub interface: String,
}

impl HostReport {
    /// Examines this host. Missing components are part of the report, not errors.
    pub fn of_this_host() -> Self {
        let opened = Library::get().and_then(ports::all);
        let (open, library_problem) = match opened {
            Ok(open) => (open, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let sysfs = Sysfs::default();
        let mut ports = Vec::new();
        for device in sysfs.devices() {
            for port in sysfs.ports(&device) {
                let found = open.iter().find(|info| info.device == device && info.port == port).cloned();
                let is_open = found.is_some();
                let adapter = found.unwrap_or_else(|| {
                    let mut unknown = AdapterInfo::new(&device, port);
                    unknown.addresses = ports::addresses(&device, port);
                    unknown
                });
                let gids = sysfs.gids(&device, port).into_iter().map(GidReport::from).collect();
                ports.push(PortReport { adapter, is_open, gids });
            }
        }
        let has_connection_manager = Path::new(MANAGER).exists();
        Self { library_problem, has_connection_manager, ports, locked_memory: locked_memory() }
    }

    /// Whether a migration over RDMA is possible.
    pub fn is_usable(&self) -> bool {
        self.library_problem.is_none()
            && self.has_connection_manager
            && self.ports.iter().any(PortReport::is_usable)
    }

    /// The missing components, one sentence with a remedy each.
    pub fn missing(&self) -> Vec<String> {
        let mut missing: Vec<String> = self.library_problem.iter().cloned().collect();
        if self.ports.is_empty() {
            missing.push(
                "the kernel knows no RDMA device: load the driver of your adapter, or create a soft-RoCE device \
                 (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE)"
                    .to_owned(),
            );
        }
        if !self.has_connection_manager {
            missing.push(format!(
                "{MANAGER} does not exist: load the kernel module rdma_ucm (modprobe rdma_ucm)"
            ));
        }
        let libraries_work = self.library_problem.is_none();
        missing.extend(self.ports.iter().filter_map(|port| port.problem(libraries_work)));
        if let Some(limit) = self.locked_memory.limit_bytes {
            missing.push(format!(
                "this process may pin only {limit} bytes of memory, but a migration pins all memory that it \
                 registers: raise the locked-memory limit (ulimit -l unlimited, LimitMEMLOCK=infinity for a service)"
            ));
        }
        missing
    }

    /// Possible improvements of speed, one sentence each.
    pub fn hints(&self) -> Vec<String> {
        let small = |port: &&PortReport| port.is_usable() && port.adapter.active_mtu < BEST_MTU;
        let hint = |port: &PortReport| {
            format!(
                "{} sends packets of {} bytes: with an interface MTU of 4200 or more it sends packets of {BEST_MTU} \
                 bytes, which is faster",
                port.name(),
                port.adapter.active_mtu
            )
        };
        self.ports.iter().filter(small).map(hint).collect()
    }
}

impl PortReport {
    /// Whether a connection over the port is possible.
    pub fn is_usable(&self) -> bool {
        self.is_open && self.adapter.state == PortState::Active && !self.adapter.addresses.is_empty()
    }

    fn name(&self) -> String {
        format!("port {} of {}", self.adapter.port, self.adapter.device)
    }

    fn problem(&self, libraries_work: bool) -> Option<String> {
        let name = self.name();
        if !self.is_open {
            return libraries_work.then(|| {
                format!(
                    "{name} cannot be opened: install its user-space driver (Debian: ibverbs-providers), load the kernel \
                     module ib_uverbs, and allow this user to use /dev/infiniband/uverbs*"
                )
            });
        }
        if self.adapter.state != PortState::Active {
            let state = self.adapter.state;
            return Some(format!("{name} is {state}: check the cable, the interface and the subnet manager"));
        }
        self.adapter.addresses.is_empty().then(|| {
            format!("{name} has no IP address, which connections need: give its network interface an address")
        })
    }
}

impl From<Gid> for GidReport {
    fn from(Gid { index, gid, kind, interface }: Gid) -> Self {
        Self { index, gid, kind, interface }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(state: PortState, addresses: &[&str]) -> PortReport {
        let mut adapter = AdapterInfo::new("rxe0", 1);
        adapter.state = state;
        adapter.active_mtu = 4096;
        adapter.addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        PortReport { adapter, is_open: true, gids: Vec::new() }
    }

    fn host(ports: Vec<PortReport>) -> HostReport {
        let locked_memory = LockedMemory { limit_bytes: None, pinned_bytes: 0 };
        HostReport { library_problem: None, has_connection_manager: true, ports, locked_memory }
    }

    #[test]
    fn host_with_an_active_port_and_an_address_misses_nothing() {
        let host = host(vec![port(PortState::Active, &["10.9.0.1"])]);

        assert!(host.is_usable());
        assert_eq!((host.missing(), host.hints()), (Vec::new(), Vec::new()));
    }

    #[test]
    fn each_thing_that_is_missing_has_its_sentence() {
        let mut closed = port(PortState::Active, &["10.9.0.1"]);
        closed.is_open = false;
        for (ports, word) in [
            (vec![], "rdma link add"),
            (vec![port(PortState::Down, &["10.9.0.1"])], "port 1 of rxe0 is down"),
            (vec![port(PortState::Active, &[])], "no IP address"),
            (vec![closed], "ibverbs-providers"),
        ] {
            let host = host(ports);
            assert!(!host.is_usable(), "{word}");
            assert!(matches!(&host.missing()[..], [only] if only.contains(word)), "{:?}", host.missing());
        }
        let mut without_manager = host(vec![port(PortState::Active, &["10.9.0.1"])]);
        without_manager.has_connection_manager = false;
        assert!(!without_manager.is_usable() && without_manager.missing()[0].contains("modprobe rdma_ucm"));
    }

    #[test]
    fn limit_and_small_packets_do_not_make_a_host_unusable() {
        let mut host = host(vec![port(PortState::Active, &["10.9.0.1"])]);
        host.locked_memory.limit_bytes = Some(65536);
        host.ports[0].adapter.active_mtu = 1024;

        assert!(host.is_usable());
        assert!(host.missing()[0].contains("65536") && host.hints()[0].contains("1024"));
    }

    #[test]
    fn library_that_is_missing_is_told_once() {
        let mut host = host(vec![port(PortState::Down, &[])]);
        host.ports[0].is_open = false;
        host.library_problem = Some("libibverbs.so.1 cannot be loaded".into());

        assert_eq!(host.missing(), ["libibverbs.so.1 cannot be loaded"]);
    }
}
