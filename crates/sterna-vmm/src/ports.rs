//! Devices of the embedder that answer ports.

use std::sync::Arc;

/// A device of the embedder that answers a range of ports. Called on vCPU threads, several at once.
pub trait PortDevice: Send + Sync {
    /// The guest reads `data.len()` bytes (1, 2 or 4) at `offset` in the range.
    fn read(&self, offset: u16, data: &mut [u8]);
    /// The guest writes `data` at `offset` in the range.
    fn write(&self, offset: u16, data: &[u8]);
}

/// Ports that a device of the embedder answers.
#[derive(Clone)]
pub struct PortRange {
    /// First port.
    pub first: u16,
    /// How many.
    pub count: u16,
    /// Who answers.
    pub device: Arc<dyn PortDevice>,
}
