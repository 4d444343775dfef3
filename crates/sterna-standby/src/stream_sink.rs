//! Interface that receives the bytes of devices' streams in checkpoints.

use sterna::error::VmError;

/// Passes the bytes on to a [`Survivor`](super::Survivor).
pub(super) trait StreamSink: Send + Sync {
    /// Before the checkpoint is held: checks that [`StreamSink::write`] will accept the bytes.
    fn check(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError>;
    /// After the checkpoint is held: writes the bytes.
    fn write(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError>;
}
