//! What holds for every migration to an address of one kind.

use sterna_transport::Address;

/// Known before anything is open.
pub(in crate::outgoing) struct Facts {
    /// The guest is stored, and is `Saved` at the end: nothing answers, and nothing runs it.
    pub stores: bool,
    /// A lost connection can be replaced.
    pub can_reconnect: bool,
    /// Multifd channels make it faster.
    pub gains_by_multifd: bool,
    /// Devices' state can go in packets on multifd channels.
    pub takes_device_packets: bool,
    /// Pages that the guest does not use need no work if they are known before the lanes begin.
    pub gains_by_hints: bool,
    /// The statistics of RDMA count.
    pub counts_rdma: bool,
}

/// The facts about migrations to `address`.
pub(in crate::outgoing) fn of(address: &Address) -> &'static Facts {
    match address {
        Address::File { .. } => &FILE,
        Address::Rdma { .. } => &RDMA,
        Address::Tcp { .. } | Address::Unix { .. } => &NETWORK,
        _ => &DESCRIPTOR,
    }
}

/// The facts about `tcp:` and `unix:`.
const NETWORK: Facts = Facts {
    stores: false,
    can_reconnect: true,
    gains_by_multifd: true,
    takes_device_packets: true,
    gains_by_hints: true,
    counts_rdma: false,
};
/// The facts about descriptors, which this side cannot open again, and of programs.
const DESCRIPTOR: Facts = Facts { can_reconnect: false, gains_by_multifd: false, ..NETWORK };

/// The facts about `file:`.
const FILE: Facts = Facts {
    stores: true,
    can_reconnect: false,
    gains_by_multifd: false,
    takes_device_packets: false,
    gains_by_hints: true,
    counts_rdma: false,
};

/// The facts about `rdma:`.
const RDMA: Facts = Facts {
    stores: false,
    can_reconnect: false,
    gains_by_multifd: false,
    takes_device_packets: true,
    // Memory is registered ahead of the lanes, whether they need it or not.
    gains_by_hints: false,
    counts_rdma: true,
};
