//! A record of a disk's stream: a header, and the bytes of a data block.

use super::super::changes::BLOCK;

pub(super) const DATA: u32 = 0;
pub(super) const ZERO: u32 = 1;
pub(super) const HEADER_BYTES: usize = 16;
/// Alignment that direct I/O requires, in bytes.
const ALIGNMENT: usize = 4096;

/// First byte, length and kind of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) start: u64,
    pub(super) length: u32,
    pub(super) kind: u32,
}

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.start.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..].copy_from_slice(&self.kind.to_le_bytes());
        bytes
    }

    /// Decodes a header. The error says why it is invalid for a disk of `disk_bytes`.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES], disk_bytes: u64) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (start, length, kind) = (u64::from(word(0)) | u64::from(word(4)) << 32, word(8), word(12));
        let fits = start.checked_add(length.into()).is_some_and(|end| end <= disk_bytes);
        let is_block = start.is_multiple_of(BLOCK) && length > 0 && u64::from(length) <= BLOCK;
        if fits && is_block && kind <= ZERO {
            return Ok(Self { start, length, kind });
        }
        Err(format!("a record of kind {kind} with {length} bytes at {start:#x} is not valid for this disk"))
    }

    /// Number of bytes that follow the header.
    pub(super) fn body_bytes(self) -> usize {
        if self.kind == DATA { self.length as usize } else { 0 }
    }
}

/// A partly sent or partly received record. Its block is aligned for direct I/O.
#[derive(Default)]
pub(super) struct Record {
    pub(super) header: [u8; HEADER_BYTES],
    block: Vec<u8>,
    /// Number of bytes sent or received so far.
    pub(super) at: usize,
    /// The record's length. The destination knows it after it has received the header.
    pub(super) length: usize,
}

impl Record {
    /// An aligned buffer for the first `length` bytes of the block.
    pub(super) fn block(&mut self, length: usize) -> &mut [u8] {
        self.block.resize(BLOCK as usize + ALIGNMENT, 0);
        let from = self.block.as_ptr().align_offset(ALIGNMENT);
        &mut self.block[from..from + length]
    }

    /// Copies the record's next bytes to `to` and returns their number.
    pub(super) fn take(&mut self, to: &mut [u8]) -> usize {
        let at = self.at;
        let length = match at.checked_sub(HEADER_BYTES) {
            None => {
                let length = to.len().min(HEADER_BYTES - at);
                to[..length].copy_from_slice(&self.header[at..at + length]);
                length
            }
            Some(from) => {
                let length = to.len().min(self.length - at);
                to[..length].copy_from_slice(&self.block(from + length)[from..]);
                length
            }
        };
        self.at += length;
        length
    }

    /// Copies received bytes into the record, up to its byte `end`. Returns their number.
    pub(super) fn put(&mut self, bytes: &[u8], end: usize) -> usize {
        let at = self.at;
        let length = bytes.len().min(end.saturating_sub(at));
        match at.checked_sub(HEADER_BYTES) {
            None => self.header[at..at + length].copy_from_slice(&bytes[..length]),
            Some(from) => self.block(from + length)[from..].copy_from_slice(&bytes[..length]),
        }
        self.at += length;
        length
    }
}
