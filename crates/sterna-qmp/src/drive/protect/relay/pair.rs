//! What the relay has of a disk's connection.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_transport::Channel;

/// A disk's connection.
pub(super) struct DiskPair {
    /// QEMU's end.
    pub(super) qemu: Arc<Channel>,
    /// Since when QEMU has asked for something and heard nothing.
    pub(super) asks: Arc<Mutex<Option<Instant>>>,
}
