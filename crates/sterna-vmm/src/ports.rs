//! Port devices that the embedder adds to a machine.

use std::sync::Arc;

/// A device of the embedder that serves a range of ports. Several vCPU threads may call it in parallel.
pub trait PortDevice: Send + Sync {
    /// The guest reads `data.len()` bytes (1, 2 or 4) at `offset` in the range.
    fn read(&self, offset: u16, data: &mut [u8]);
    /// The guest writes `data` at `offset` in the range.
    fn write(&self, offset: u16, data: &[u8]);
}

/// A range of ports and the embedder's device that serves it.
#[derive(Clone)]
pub struct PortRange {
    /// Number of the first port.
    pub first: u16,
    /// Number of ports in the range.
    pub count: u16,
    /// The device that serves the range.
    pub device: Arc<dyn PortDevice>,
}
