//! Whole control messages, header and payload (`specs/rdma.md §3`).

use super::header::Header;
use super::limits::{MOST_REPEATED, PAYLOAD_BYTES};
use super::message_type::MessageType;
use super::records::{
    BlockPlace, Record, Records, RegisterRequest, RegisterResult, UnregisterRequest, ZeroRange,
};
use crate::error::WireError;

/// A received message that borrows the receive buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// The peer has failed, and sends no further message.
    Error,
    /// The listener accepts one more command.
    Ready,
    /// Bytes of the stream, at least one.
    File(&'a [u8]),
    /// Asks for the positions of the blocks.
    RamBlocksRequest,
    /// One entry for each block, in the order of the stream's block list.
    RamBlocksResult(Records<'a, BlockPlace>),
    /// Ranges that contain only zeros.
    Compress(Records<'a, ZeroRange>),
    /// Memory that the destination must register.
    RegisterRequest(Records<'a, RegisterRequest>),
    /// Keys for the requests, in their order. QEMU sends only the first one.
    RegisterResult(Records<'a, RegisterResult>),
    /// The phase is over.
    RegisterFinished,
    /// Chunks that the destination must deregister.
    UnregisterRequest(Records<'a, UnregisterRequest>),
    /// The chunks are deregistered.
    UnregisterFinished,
}

impl<'a> Message<'a> {
    /// Decodes the message of one completed receive. `received` must be the whole message.
    ///
    /// # Errors
    /// As [`Header::decode`].
    pub fn decode(received: &'a [u8]) -> Result<Self, WireError> {
        let header = Header::decode(received)?;
        let payload = &received[Header::BYTES..];
        Ok(match header.kind {
            MessageType::Error => Self::Error,
            MessageType::Ready => Self::Ready,
            MessageType::File => Self::File(payload),
            MessageType::RamBlocksRequest => Self::RamBlocksRequest,
            MessageType::RamBlocksResult => Self::RamBlocksResult(Records::new(payload)),
            MessageType::Compress => Self::Compress(Records::new(payload)),
            MessageType::RegisterRequest => Self::RegisterRequest(Records::new(payload)),
            MessageType::RegisterResult => Self::RegisterResult(Records::new(payload)),
            MessageType::RegisterFinished => Self::RegisterFinished,
            MessageType::UnregisterRequest => Self::UnregisterRequest(Records::new(payload)),
            MessageType::UnregisterFinished => Self::UnregisterFinished,
        })
    }

    /// Type of the message.
    pub fn kind(&self) -> MessageType {
        match self {
            Self::Error => MessageType::Error,
            Self::Ready => MessageType::Ready,
            Self::File(_) => MessageType::File,
            Self::RamBlocksRequest => MessageType::RamBlocksRequest,
            Self::RamBlocksResult(_) => MessageType::RamBlocksResult,
            Self::Compress(_) => MessageType::Compress,
            Self::RegisterRequest(_) => MessageType::RegisterRequest,
            Self::RegisterResult(_) => MessageType::RegisterResult,
            Self::RegisterFinished => MessageType::RegisterFinished,
            Self::UnregisterRequest(_) => MessageType::UnregisterRequest,
            Self::UnregisterFinished => MessageType::UnregisterFinished,
        }
    }
}

/// Appends a message without payload.
///
/// The types are ERROR, READY, RAM_BLOCKS_REQUEST, REGISTER_FINISHED and UNREGISTER_FINISHED. `repeat` is the
/// request's repeat for UNREGISTER_FINISHED, and 1 for the others.
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when messages of the type have a payload, or for a repeat that is not
/// 1 to [`MOST_REPEATED`].
pub fn encode_empty(kind: MessageType, repeat: u32, out: &mut Vec<u8>) -> Result<(), WireError> {
    use MessageType::*;
    let is_empty = matches!(kind, Error | Ready | RamBlocksRequest | RegisterFinished | UnregisterFinished);
    if !is_empty || !(1..=MOST_REPEATED).contains(&repeat) {
        let rule = format!(
            "repeat {repeat} without payload: the type has one, or repeat is not 1 to {MOST_REPEATED}"
        );
        return Err(WireError::local(kind.name(), 0, "specs/rdma.md §3.2", rule));
    }
    out.extend_from_slice(&Header { kind, length: 0, repeat }.to_bytes());
    Ok(())
}

/// Appends a FILE message with a piece of the stream.
///
/// # Errors
/// As [`Header::file`].
pub fn encode_file(stream: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
    out.extend_from_slice(&Header::file(stream.len())?.to_bytes());
    out.extend_from_slice(stream);
    Ok(())
}

/// Appends a message with `records`.
///
/// Towards a QEMU, send one record per message, except for blocks. QEMU answers several requests wrongly, and
/// clears only the first of several zero ranges (§4.2, §4.4).
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when `records` is empty, or too long for a message.
pub fn encode_records<T: Record>(records: &[T], out: &mut Vec<u8>) -> Result<(), WireError> {
    let are_blocks = T::TYPE == MessageType::RamBlocksResult;
    let most = if are_blocks { PAYLOAD_BYTES / T::BYTES } else { MOST_REPEATED as usize };
    if records.len() > most || records.is_empty() && !are_blocks {
        let rule = format!("{} records in a message, not 1 to {most}", records.len());
        return Err(WireError::local(T::TYPE.name(), 0, "specs/rdma.md §3.1", rule));
    }
    let repeat = if are_blocks { 1 } else { records.len() as u32 };
    let header = Header { kind: T::TYPE, length: (records.len() * T::BYTES) as u32, repeat };
    out.extend_from_slice(&header.to_bytes());
    records.iter().for_each(|record| record.encode(out));
    Ok(())
}
