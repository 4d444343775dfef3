//! State of reconnections. A *dial* is the source's attempt to connect again.

/// The result of a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialEnd {
    /// The session has begun, over connections of this generation.
    Taken(u32),
    /// The destination does not continue this migration.
    Refused,
    /// No answer arrived within the limit.
    Nothing,
}

/// Both sides' numbers of sessions.
#[derive(Debug, Default)]
pub(super) struct Dials {
    /// The last session that the source has dialled, and whether it waits for the result.
    pub(super) last: u32,
    pub(super) is_waiting: bool,
    /// The last accepted session, and one that waits until the lost session has ended.
    pub(super) taken: u32,
    pub(super) pending: Option<u32>,
}

impl Dials {
    /// The last session that the destination has accepted.
    pub(super) fn taken(&self) -> u32 {
        self.taken
    }

    /// The last session that the source has dialled.
    pub(super) fn session(&self) -> u32 {
        self.last
    }
}
