//! The error for a peer that breaks the protocol of a session.

use crate::frame::{FrameError, SessionId};

/// A frame that ends the session, because the peer has proved that it belongs to it and breaks its rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("session {session}, carrier {lane}: {source}; the relay of the other host is at fault")]
pub struct SessionError {
    /// The session.
    pub session: SessionId,
    /// Number of the carrier that brought the frame.
    pub lane: u8,
    /// The frame and the rule.
    pub source: FrameError,
}
