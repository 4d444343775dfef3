//! What a live save takes and returns.

use std::sync::Arc;
use std::time::Duration;

use super::changes::ChangeLog;
use crate::vm::RunState;

/// Options of a live save, in addition to [`Parameters`](crate::Parameters).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LiveSaveOptions {
    /// Most bytes of pages that are copied because the guest writes them before they are sent: 256 MiB by default.
    pub buffer_bytes: u64,
    /// How long a write of the guest waits while these copies are full: 10 s by default. Then the save fails, and the guest
    /// runs.
    pub longest_hold: Duration,
    /// The log of the guest's changes, for a save that later saves are based on, or that is based on an earlier one.
    pub changes: Option<Snapshot>,
}

impl Default for LiveSaveOptions {
    fn default() -> Self {
        Self { buffer_bytes: 256 << 20, longest_hold: Duration::from_secs(10), changes: None }
    }
}

/// A save in a series of saves that contain only changes.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The log of the series.
    pub log: Arc<ChangeLog>,
    /// Number of the earlier save whose later changes are saved. None: all pages are saved.
    pub since: Option<u64>,
}

/// A completed live save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveSaved {
    /// Time for which the guest was paused.
    pub pause: Duration,
    /// Whether the guest ran before and after the pause.
    pub run_state: RunState,
    /// Number of the save in its [`ChangeLog`].
    pub number: Option<u64>,
    /// Bytes of the stream.
    pub bytes: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Writes of the guest that waited until their page was copied.
    pub held_writes: u64,
}
