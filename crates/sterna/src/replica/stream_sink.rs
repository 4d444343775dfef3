//! Where what checkpoints bring of devices' streams goes.

use crate::error::VmError;

/// Takes it: see [`Survivor`](super::Survivor), which has it.
pub(super) trait StreamSink: Send + Sync {
    /// Before it is held: whether [`StreamSink::write`] will take it.
    fn check(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError>;
    /// It is held.
    fn write(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError>;
}
