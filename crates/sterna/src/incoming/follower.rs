//! The interface to a standby, which receives a COLO primary's checkpoints after the acknowledgement
//! (`specs/colo.md`).
//!
//! The seeding is an ordinary migration. Its handover machine has finished when SHUT 0 is due. Afterwards
//! [`super::checkpoints`] reads the main channel, and lanes continue unchanged.

use std::time::Duration;

use crate::error::MigrationError;

/// Stores checkpoints. The loader calls all methods except [`begin`](Self::begin), [`lost`](Self::lost) and
/// [`wait_until_over`](Self::wait_until_over).
pub trait Follower: Send + Sync {
    /// SHUT 0 and READY are sent now: all later data are part of checkpoints.
    fn begin(&self);
    /// Waits at most `most` for [`begin`](Self::begin).
    fn wait_until_begun(&self, most: Duration);
    /// Whether [`begin`](Self::begin) was called.
    fn has_begun(&self) -> bool;
    /// REPLY is sent now: pages of a checkpoint may arrive on any lane.
    fn open(&self) -> Result<(), MigrationError>;
    /// The checkpoint's RAM is complete on all lanes. Pages that arrive now wait for the next checkpoint.
    fn close(&self);
    /// The checkpoint's devices have arrived. When this returns, the checkpoint is held and RECEIVED is sent.
    fn hold(&self, devices: Vec<u8>) -> Result<(), MigrationError>;
    /// LOADED was sent: the held checkpoint may be applied.
    fn apply(&self) -> Result<(), MigrationError>;
    /// The connection was lost because of `why`. The incomplete checkpoint is dropped.
    fn lost(&self, why: MigrationError);
    /// Waits until the connection is lost or [`end`](Self::end) was called.
    fn wait_until_over(&self);
    /// Ends the wait of [`wait_until_over`](Self::wait_until_over): no more checkpoints are needed.
    fn end(&self);
}
