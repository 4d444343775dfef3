//! Sizes of an endpoint's buffers, and their parts.

use crate::rdma::connection::QueuePairAttributes;
use crate::rdma::memory::{Piece, Registration};

/// Sizes of an endpoint's buffers and queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointSizes {
    /// Maximum bytes of a message, in both directions.
    pub message_bytes: u32,
    /// Number of buffers for received messages.
    pub receives: u32,
    /// Number of buffers for messages to send.
    pub sends: u32,
    /// Maximum number of writes in flight.
    pub writes: u32,
}

impl EndpointSizes {
    /// Sizes for messages without writes.
    pub const fn messages(message_bytes: u32, receives: u32, sends: u32) -> Self {
        Self { message_bytes, receives, sends, writes: 0 }
    }

    /// Adds room for `writes` writes in flight.
    #[must_use]
    pub const fn with_writes(mut self, writes: u32) -> Self {
        self.writes = writes;
        self
    }

    /// The queue pair's attributes for these sizes, without remote writes.
    ///
    /// [`QueuePairAttributes::with_remote_write`] adds them.
    pub const fn attributes(&self) -> QueuePairAttributes {
        QueuePairAttributes::new(self.sends + self.writes, self.receives)
    }
}

/// A write of this side's bytes into the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The bytes, in registered memory of this side.
    pub from: Piece,
    /// Destination address in the peer's process.
    pub address: u64,
    /// Remote key of the peer's registration.
    pub rkey: u32,
}

/// The part of the buffer of message `slot` with length `len`.
pub(super) fn place(buffers: &Registration, message_bytes: u32, slot: u32, len: u32) -> Piece {
    let offset = slot as usize * message_bytes as usize;
    buffers.piece(offset, len).unwrap_or(Piece::EMPTY)
}
