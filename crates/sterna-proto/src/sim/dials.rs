//! What is known of connections that are made anew.

/// What the destination answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialEnd {
    /// The session has begun, over connections of this generation.
    Taken(u32),
    /// It does not go on with this migration.
    Refused,
    /// No answer came.
    Nothing,
}

/// Both sides' view of sessions.
#[derive(Debug, Default)]
pub(super) struct Dials {
    /// The last one that the source has dialled, and whether it waits for its end.
    pub(super) last: u32,
    pub(super) is_waiting: bool,
    /// The last one that the destination has taken, and one that waits until the lost session has ended.
    pub(super) taken: u32,
    pub(super) pending: Option<u32>,
}

impl Dials {
    /// The session that the destination has taken last.
    pub(super) fn taken(&self) -> u32 {
        self.taken
    }

    /// The last session that the source has dialled.
    pub(super) fn session(&self) -> u32 {
        self.last
    }
}
