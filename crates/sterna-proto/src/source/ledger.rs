//! Record of the effects that a migration has had on the guest. `undo.rs` reverts exactly these.

use std::time::Duration;

use super::types::{End, Hold};

/// Effects of this migration on the guest so far, and deadlines of attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ledger {
    pub(super) guest: Guest,
    pub(super) hooks: Hooks,
    /// Dirty tracking may be on. Set before the start is certain, so that a failure turns it off.
    pub(super) tracking: bool,
    pub(super) tracking_left_on: bool,
    /// [`Action::StopTracking`](super::Action::StopTracking) was issued and has not ended.
    pub(super) untracking: bool,
    /// The migration has switched to postcopy.
    pub(super) postcopy: bool,
    /// In postcopy, the engine sends the last pages and EOF.
    pub(super) pages_sent: bool,
    /// All channels are closed: the engine feeds no event of theirs any more.
    pub(super) channels_closed: bool,
    /// An operator has requested `resume`. The recovery starts once `channels_closed` is set.
    pub(super) resumes: bool,
    /// In postcopy, the source reconnects without an operator until this time.
    pub(super) recover_until: Option<Duration>,
    /// The result that the migration reports when the undoing is complete.
    pub(super) end: Option<End>,
    pub(super) hold: Option<Hold>,
    /// Deadline of the attempts to reconnect.
    pub(super) reconnect_until: Option<Duration>,
    /// Deadline of the attempts to re-acquire hooks.
    pub(super) reacquire_until: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Guest {
    /// Not stopped by this migration: it runs or is paused as its operator chose.
    #[default]
    Free,
    Stopping,
    Stopped {
        was_running: bool,
    },
    Resuming,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Hooks {
    #[default]
    Acquired,
    Releasing,
    /// Some or all hooks are released.
    Released,
    Reacquiring,
    /// The last attempt failed; the machine retries at its deadline.
    Retrying,
}

impl Ledger {
    pub(super) fn is_guest_free(&self) -> bool {
        self.guest == Guest::Free
    }
}
