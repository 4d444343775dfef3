//! The relay's record of a disk's connection.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_transport::Channel;

/// The relay's state for one disk's connection.
pub(super) struct DiskPair {
    /// QEMU's end.
    pub(super) qemu: Arc<Channel>,
    /// Time since which QEMU has waited for an answer on this connection.
    pub(super) asks: Arc<Mutex<Option<Instant>>>,
}
