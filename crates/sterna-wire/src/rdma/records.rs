//! The records inside the payloads of control messages (`specs/rdma.md §4`).

use super::limits::HEADER_BYTES;
use super::message_type::MessageType;
use std::marker::PhantomData;

/// Position of a block at the destination: an entry of RAM_BLOCKS_RESULT (§4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockPlace {
    /// Address of the block's first byte in the destination's process.
    pub host_address: u64,
    /// Number that the source adds to offsets in the block. The destination chooses it.
    pub offset: u64,
    /// Length of the block in bytes.
    pub length_bytes: u64,
    /// The key of the whole block, or 0.
    ///
    /// It is set with pin-all, and for a block that a Sterna has registered on demand (§6.8).
    pub key: u32,
}

/// A request to register memory (§4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterRequest {
    /// The block's [`offset`](BlockPlace::offset) plus the offset in the block of the first byte.
    pub key: u64,
    /// Index of the block in RAM_BLOCKS_RESULT.
    pub block: u32,
    /// Number of chunks after the one that contains the first byte.
    pub more_chunks: u64,
}

/// The answer to a [`RegisterRequest`] (§4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterResult {
    /// The key that the source uses for its WRITEs.
    pub key: u32,
    /// Address of the *block's* first byte, not of the registered memory.
    pub host_address: u64,
}

/// The record of COMPRESS: a range that contains only zeros (§4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ZeroRange {
    /// The value of every byte in the range: 0.
    pub value: u32,
    /// Index of the block in RAM_BLOCKS_RESULT.
    pub block: u32,
    /// The block's [`offset`](BlockPlace::offset) plus the offset in the block of the first byte.
    pub start: u64,
    /// Length of the range, in bytes.
    pub length: u64,
}

/// A request to deregister a chunk (§4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnregisterRequest {
    /// Number of the chunk in its block, from 0, by the destination's chunk size.
    pub chunk: u64,
    /// Index of the block in RAM_BLOCKS_RESULT.
    pub block: u32,
}

/// A record of fixed length. A payload has one or more of one type.
///
/// Padding is 0 in sent records and ignored in received ones.
pub trait Record: Sized + Copy {
    /// Type of the message that has these records.
    const TYPE: MessageType;
    /// Length on the wire, in bytes.
    const BYTES: usize;
    /// Appends the bytes on the wire.
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads one record from the first [`BYTES`](Self::BYTES) bytes.
    ///
    /// # Panics
    /// When `bytes` is shorter.
    fn decode(bytes: &[u8]) -> Self;
}

impl Record for BlockPlace {
    const TYPE: MessageType = MessageType::RamBlocksResult;
    const BYTES: usize = 32;

    fn encode(&self, out: &mut Vec<u8>) {
        for word in [self.host_address, self.offset, self.length_bytes] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        put32(out, &[self.key, 0]);
    }

    fn decode(bytes: &[u8]) -> Self {
        Self {
            host_address: be64(bytes, 0),
            offset: be64(bytes, 8),
            length_bytes: be64(bytes, 16),
            key: be32(bytes, 24),
        }
    }
}

impl Record for RegisterRequest {
    const TYPE: MessageType = MessageType::RegisterRequest;
    const BYTES: usize = 24;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key.to_be_bytes());
        put32(out, &[self.block, 0]);
        out.extend_from_slice(&self.more_chunks.to_be_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { key: be64(bytes, 0), block: be32(bytes, 8), more_chunks: be64(bytes, 16) }
    }
}

impl Record for RegisterResult {
    const TYPE: MessageType = MessageType::RegisterResult;
    const BYTES: usize = 16;

    fn encode(&self, out: &mut Vec<u8>) {
        put32(out, &[self.key, 0]);
        out.extend_from_slice(&self.host_address.to_be_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { key: be32(bytes, 0), host_address: be64(bytes, 8) }
    }
}

impl Record for ZeroRange {
    const TYPE: MessageType = MessageType::Compress;
    const BYTES: usize = 24;

    fn encode(&self, out: &mut Vec<u8>) {
        put32(out, &[self.value, self.block]);
        out.extend_from_slice(&self.start.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { value: be32(bytes, 0), block: be32(bytes, 4), start: be64(bytes, 8), length: be64(bytes, 16) }
    }
}

impl Record for UnregisterRequest {
    const TYPE: MessageType = MessageType::UnregisterRequest;
    const BYTES: usize = 24;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.chunk.to_be_bytes());
        put32(out, &[self.block, 0]);
        out.extend_from_slice(&[0; 8]);
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { chunk: be64(bytes, 0), block: be32(bytes, 8) }
    }
}

/// The records of a received payload, decoded in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Records<'a, T> {
    payload: &'a [u8],
    record: PhantomData<T>,
}

impl<'a, T: Record> Records<'a, T> {
    /// The caller ensures that `payload` is a whole number of records.
    pub(super) fn new(payload: &'a [u8]) -> Self {
        Self { payload, record: PhantomData }
    }

    /// Number of records in the payload.
    pub fn len(&self) -> usize {
        self.payload.len() / T::BYTES
    }

    /// Whether the payload has no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The records, each with its position in bytes from the start of the message.
    ///
    /// The checks of [`BlockPlaces`](super::BlockPlaces) need the position, so that their errors name the byte.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, T)> + use<'a, T> {
        let positions = (0..self.len()).map(|index| (HEADER_BYTES + index * T::BYTES) as u64);
        positions.zip(self.payload.chunks_exact(T::BYTES).map(T::decode))
    }
}

pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}

fn put32(out: &mut Vec<u8>, words: &[u32]) {
    for word in words {
        out.extend_from_slice(&word.to_be_bytes());
    }
}
