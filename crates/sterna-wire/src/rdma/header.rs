//! The 16-byte header of every control message (`specs/rdma.md §3.1`, `§3.2`).

use super::limits::HEADER_BYTES;
use super::limits::{MESSAGE_BYTES, MOST_REPEATED, PAYLOAD_BYTES};
use super::message_type::MessageType;
use super::records;
use super::records::Record;
use crate::error::WireError;

const SPEC: &str = "specs/rdma.md §3.1";
const TYPES: &str = "specs/rdma.md §3.2";

/// The header of a control message. The payload follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Type of the message.
    pub kind: MessageType,
    /// Length of the payload, in bytes.
    pub length: u32,
    /// Number of commands in the payload; 0 in a FILE message.
    pub repeat: u32,
}

impl Header {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = HEADER_BYTES;

    /// The header of a FILE message with `length` bytes of stream.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when `length` is 0 or more than [`PAYLOAD_BYTES`].
    pub fn file(length: usize) -> Result<Self, WireError> {
        match u32::try_from(length) {
            Ok(bytes) if (1..=PAYLOAD_BYTES).contains(&length) => {
                Ok(Self { kind: MessageType::File, length: bytes, repeat: 0 })
            }
            _ => {
                let rule = format!("{length} bytes of stream, not 1 to {PAYLOAD_BYTES}: cut them");
                Err(WireError::local(MessageType::File.name(), 0, SPEC, rule))
            }
        }
    }

    /// The header as it is on the wire. The last four bytes are padding.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        for (field, word) in out.chunks_exact_mut(4).zip([self.length, self.kind.code(), self.repeat]) {
            field.copy_from_slice(&word.to_be_bytes());
        }
        out
    }

    /// Reads the header of the message `received`, which must be complete.
    ///
    /// # Errors
    /// - fewer bytes than a header has, or an unknown type
    /// - a length that does not match the received bytes or the type, or is above [`PAYLOAD_BYTES`]
    /// - a repeat that is not 1 to [`MOST_REPEATED`] (only types with a repeat)
    pub fn decode(received: &[u8]) -> Result<Self, WireError> {
        let (message, bytes) = ("control message", received.len());
        let Some((head, payload)) = received.split_first_chunk::<{ Self::BYTES }>() else {
            let rule = format!("{bytes} bytes, but a header has {}", Self::BYTES);
            return Err(WireError::misbehaved(message, bytes as u64, SPEC, rule));
        };
        // The fourth word is padding with arbitrary content.
        let [length, code, repeat] = [0, 4, 8].map(|at| records::be32(head, at));
        let Some(kind) = MessageType::from_code(code) else {
            return Err(WireError::misbehaved(message, 4, TYPES, format!("type {code} is not 1 to 11")));
        };
        let bad = |at, rule| Err(WireError::misbehaved(kind.name(), at, SPEC, rule));
        if length as usize != payload.len() || bytes > MESSAGE_BYTES {
            let rule = format!(
                "its length is {length}, but {} bytes follow the header, and at most {PAYLOAD_BYTES} are permitted",
                payload.len()
            );
            return bad(0, rule);
        }
        let header = Self { kind, length, repeat };
        if header.counts_commands() && !(1..=MOST_REPEATED).contains(&repeat) {
            return bad(8, format!("repeat is {repeat}, not 1 to {MOST_REPEATED}"));
        }
        if !header.length_fits() {
            return bad(0, format!("its length is {length}, which does not fit repeat {repeat}"));
        }
        Ok(header)
    }

    /// Whether `repeat` is the number of records in messages of this type.
    fn counts_commands(&self) -> bool {
        use MessageType::*;
        matches!(
            self.kind,
            Compress | RegisterRequest | RegisterResult | UnregisterRequest | UnregisterFinished
        )
    }

    fn length_fits(&self) -> bool {
        use MessageType::*;
        let length = self.length as usize;
        let records = |bytes: usize| length == bytes * self.repeat as usize;
        match self.kind {
            Error | Ready | RamBlocksRequest | RegisterFinished | UnregisterFinished => length == 0,
            File => length > 0,
            RamBlocksResult => length.is_multiple_of(super::records::BlockPlace::BYTES),
            Compress => records(super::records::ZeroRange::BYTES),
            RegisterRequest => records(super::records::RegisterRequest::BYTES),
            UnregisterRequest => records(super::records::UnregisterRequest::BYTES),
            // QEMU answers several requests with the first result only, and states the requests' repeat.
            RegisterResult => {
                length == super::records::RegisterResult::BYTES
                    || records(super::records::RegisterResult::BYTES)
            }
        }
    }
}
