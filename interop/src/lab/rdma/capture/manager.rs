//! Decodes the messages of the connection manager that establish a connection.

use super::packet::{Packet, be16, be24, be32};

/// Kinds of messages, from the attribute in the management header.
const REQUEST: u16 = 0x10;
const REPLY: u16 = 0x13;
const HEADER_BYTES: usize = 24;
/// Offsets of the private data in the two messages, after the header. The first part of a request's private
/// data is the connection manager's.
const REQUEST_DATA: usize = 140 + 36;
const REPLY_DATA: usize = 36;

/// A request for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::rdma) struct Request {
    /// Its number at the requesting side, and that side's queue pair.
    pub(super) id: u32,
    pub(super) pair: u32,
    /// Described at [`Self::conditions`].
    conditions: [u8; 4],
    /// The 56 bytes that a program can set.
    pub(in crate::lab::rdma) private_data: Vec<u8>,
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::rdma) struct Reply {
    /// Number of the request.
    pub(super) id: u32,
    /// The queue pair of the replying side.
    pub(super) pair: u32,
    /// The 196 bytes that a program can set.
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

    /// Responder resources, initiator depth, retries, and retries when no receive is posted.
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
