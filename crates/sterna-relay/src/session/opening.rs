//! The result of a new flow.

/// Whether the session accepted a connection of a VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// The number of the flow.
    Flow(u32),
    /// The session has as many flows as it may have, is over, or is the acceptor's.
    Refused,
}
