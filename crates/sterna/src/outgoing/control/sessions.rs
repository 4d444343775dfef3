//! What the control thread knows of a migration's sessions.

use crate::outgoing::streams::Suspended;
use crate::reconnect::Dialled;

/// What is known of lost connections.
#[derive(Default)]
pub(super) struct Reconnecting {
    /// The last session that was dialled.
    pub(super) session: u32,
    /// Channels of a session that has not begun.
    pub(super) dialled: Option<Dialled>,
    /// Devices' streams of the session that was lost, if they can go on.
    pub(super) streams: Option<Suspended>,
    /// The number of the round with which the policy began anew, less 1.
    pub(super) rounds_before: u64,
}
