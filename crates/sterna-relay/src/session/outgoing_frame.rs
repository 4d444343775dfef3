//! A frame that a carrier sends next.

use super::piece::Piece;
use crate::frame::Frame;

/// A frame to send, with the payload of DATA.
#[derive(Debug, Clone)]
pub struct OutgoingFrame {
    /// The frame.
    pub frame: Frame,
    /// The bytes that follow it.
    pub payload: Option<Piece>,
}

impl From<Frame> for OutgoingFrame {
    fn from(frame: Frame) -> Self {
        Self { frame, payload: None }
    }
}
