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
    /// Of DATA that may be packed: how.
    pub packing: Option<PackingHint>,
}

/// What a packer needs to know about the bytes of DATA.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackingHint {
    /// Positions in the payload at which whole pages of guest memory begin, in order.
    pub pages: Vec<usize>,
    /// Some of the bytes were sent before: they go without references.
    pub is_again: bool,
}

impl From<Frame> for OutgoingFrame {
    fn from(frame: Frame) -> Self {
        Self { frame, payload: None, packing: None }
    }
}
