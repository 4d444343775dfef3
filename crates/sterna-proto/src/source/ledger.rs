//! What a migration has done to the guest, so that it can be undone.

use std::time::Duration;

use super::types::{End, Hold};

/// What this migration has done to the guest so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ledger {
    pub(super) guest: Guest,
    pub(super) hooks: Hooks,
    /// Dirty tracking may be on.
    pub(super) tracking: bool,
    pub(super) tracking_left_on: bool,
    /// `StopTracking` is under way.
    pub(super) untracking: bool,
    /// The guest runs before its pages are there.
    pub(super) postcopy: bool,
    /// In postcopy, all pages and EOF have gone out.
    pub(super) pages_sent: bool,
    /// Nothing of the channels is fed any more.
    pub(super) channels_closed: bool,
    /// In postcopy, an operator wants to go on, as soon as that is so.
    pub(super) resumes: bool,
    /// In postcopy, the source connects again by itself until then.
    pub(super) recover_until: Option<Duration>,
    /// How the migration will have ended.
    pub(super) end: Option<End>,
    pub(super) hold: Option<Hold>,
    /// Attempts to connect again end here.
    pub(super) reconnect_until: Option<Duration>,
    /// Attempts to re-acquire hooks end here.
    pub(super) reacquire_until: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Guest {
    /// Runs, or is paused, as its operator likes.
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
    /// Some or all are released.
    Released,
    Reacquiring,
    /// The last attempt failed; the next one comes at the deadline.
    Retrying,
}

impl Ledger {
    pub(super) fn is_guest_free(&self) -> bool {
        self.guest == Guest::Free
    }
}
