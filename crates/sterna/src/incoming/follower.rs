//! What follows a guest behind the acknowledgement: a standby, to which a COLO primary sends checkpoints (`specs/colo.md`).
//!
//! The seeding is a migration like any other. The machine that handles it has come to its end when SHUT 0 is due; from then
//! on [`super::checkpoints`] speaks on the main channel, and lanes go on as they are.

use std::time::Duration;

use crate::error::MigrationError;

/// Holds checkpoints. Called by the loader, but for [`begin`](Self::begin), [`lost`](Self::lost) and
/// [`wait_until_over`](Self::wait_until_over).
pub(crate) trait Follower: Send + Sync {
    /// SHUT 0 and READY go out now: what comes from here on belongs to checkpoints.
    fn begin(&self);
    /// Waits for [`begin`](Self::begin), no longer than `most`.
    fn wait_until_begun(&self, most: Duration);
    /// Whether [`begin`](Self::begin) was called.
    fn has_begun(&self) -> bool;
    /// REPLY goes out now: the pages of a checkpoint may come, on any lane.
    fn open(&self) -> Result<(), MigrationError>;
    /// The checkpoint's RAM has come, in step with all lanes. Pages that come now wait for the next one.
    fn close(&self);
    /// The checkpoint's devices have come. When this returns the checkpoint is held, and RECEIVED goes out.
    fn hold(&self, devices: Vec<u8>) -> Result<(), MigrationError>;
    /// LOADED has gone out.
    fn apply(&self) -> Result<(), MigrationError>;
    /// Nothing more comes, for `why`. The checkpoint that was on its way is dropped.
    fn lost(&self, why: MigrationError);
    /// Waits until nothing more comes, or nobody wants more.
    fn wait_until_over(&self);
    /// Nobody wants more.
    fn end(&self);
}
