//! Which process may send requests to a back end.

/// The process that may send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// This process may send requests, and its negotiation is valid.
    Ours,
    /// Another process may send requests. This process sends none.
    Theirs,
    /// This process may send requests again, or for the first time. It must negotiate with the back end
    /// first.
    Regained,
}
