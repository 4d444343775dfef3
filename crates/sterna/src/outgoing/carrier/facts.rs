//! What holds for every migration to an address of one kind.

/// Known before anything is open.
pub(in crate::outgoing) struct Facts {
    /// The guest is stored, and is `Saved` at the end: nothing answers, and nothing runs it.
    pub stores: bool,
    /// Another connection to the destination can be made, which asks it for its status.
    pub can_ask: bool,
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
