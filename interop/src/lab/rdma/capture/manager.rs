//! What the connection manager sends when a connection is made.

use super::packet::{Packet, be16, be24, be32};

/// The kinds of its messages, in the management header's attribute.
const REQUEST: u16 = 0x10;
const REPLY: u16 = 0x13;
const HEADER_BYTES: usize = 24;
/// Where the two messages have their private data, after the header. The first part of a request's is of the connection manager.
const REQUEST_DATA: usize = 140 + 36;
const REPLY_DATA: usize = 36;

/// The wish for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::rdma) struct Request {
    /// Its number at the side that asks, and the queue pair there.
    pub(super) id: u32,
    pub(super) pair: u32,
    /// As [`Self::conditions`] lists them.
    conditions: [u8; 4],
    /// The 56 bytes that a program may fill.
    pub(in crate::lab::rdma) private_data: Vec<u8>,
}

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::rdma) struct Reply {
    /// The number of the request.
    pub(super) id: u32,
    /// The queue pair at the side that answers.
    pub(super) pair: u32,
    /// The 196 bytes that a program may fill.
    pub(in crate::lab::rdma) private_data: Vec<u8>,
}

impl Request {
    pub(super) fn of(packet: &Packet) -> Option<Self> {
        let message = message(packet, REQUEST)?;
        Some(Self {
            id: be32(message, 0)?,
            pair: be24(message, 32)?,
            conditions: [*message.get(35)?, *message.get(39)?, message.get(47)? & 7, message.get(50)? & 7],
            private_data: message.get(REQUEST_DATA..)?.to_vec(),
        })
    }

    /// Responder resources, initiator depth, retries, and retries for want of a receive.
    pub(in crate::lab::rdma) fn conditions(&self) -> [u8; 4] {
        self.conditions
    }
}

impl Reply {
    pub(super) fn of(packet: &Packet) -> Option<Self> {
        let message = message(packet, REPLY)?;
        Some(Self {
            id: be32(message, 4)?,
            pair: be24(message, 12)?,
            private_data: message.get(REPLY_DATA..)?.to_vec(),
        })
    }
}

fn message(packet: &Packet, kind: u16) -> Option<&[u8]> {
    packet.body.get(HEADER_BYTES..).filter(|_| be16(&packet.body, 16) == Some(kind))
}
