//! Who speaks with a back end.

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// This process's, and the back end knows it.
    Ours,
    /// Another one's: nothing is said here.
    Theirs,
    /// This process's again, or for the first time: before anything else it agrees with the back end on what holds.
    Regained,
}
