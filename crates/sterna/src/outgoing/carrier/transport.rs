//! What the engine asks of a transport before anything is open.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::{Address, CancelFlag, Channel};

use super::interface::Carrier;
use crate::error::MigrationError;
use crate::outgoing::shared::Shared;

/// A way to an address of one kind.
pub(in crate::outgoing) struct Transport {
    pub facts: Facts,
    /// Opens every channel.
    pub open: fn(&Arc<Shared>) -> Result<Box<dyn Carrier>, MigrationError>,
    /// Opens another connection, for a status question.
    pub ask: fn(&Question<'_>) -> Result<Arc<Channel>, MigrationError>,
}

/// What holds for every migration to an address of one kind.
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

/// A connection for a status question.
pub(in crate::outgoing) struct Question<'a> {
    pub shared: &'a Shared,
    pub to: &'a Address,
    pub limit: Duration,
    pub cancel: &'a CancelFlag,
    /// Registers the channel as soon as it exists, so that another thread can shut it down.
    pub adopt: &'a dyn Fn(Channel) -> Arc<Channel>,
}
