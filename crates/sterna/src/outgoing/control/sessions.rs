//! The control thread's state about a migration's sessions.

use crate::outgoing::streams::Suspended;
use crate::reconnect::Dialled;

/// State about lost connections.
#[derive(Default)]
pub(super) struct Reconnecting {
    /// The number of the last session that was dialled.
    pub(super) session: u32,
    /// Open channels of a session that has not begun.
    pub(super) dialled: Option<Dialled>,
    /// Device streams of the lost session, if they can continue in the next one.
    pub(super) streams: Option<Suspended>,
    /// The rounds before the policy restarted: the number of its first round, less 1.
    pub(super) rounds_before: u64,
}
