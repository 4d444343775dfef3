//! A record of the stream: a header, and the block's bytes if it is data.

use super::super::changes::BLOCK;

pub(super) const DATA: u32 = 0;
pub(super) const ZERO: u32 = 1;
pub(super) const HEADER_BYTES: usize = 16;
/// For direct I/O.
const ALIGNMENT: usize = 4096;

/// Where a block begins, how long it is, and what it is.
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

    /// None if it is a header of no disk of that length.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES], disk_bytes: u64) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (start, length, kind) = (u64::from(word(0)) | u64::from(word(4)) << 32, word(8), word(12));
        let fits = start.checked_add(length.into()).is_some_and(|end| end <= disk_bytes);
        let is_block = start.is_multiple_of(BLOCK) && length > 0 && u64::from(length) <= BLOCK;
        if fits && is_block && kind <= ZERO {
            return Ok(Self { start, length, kind });
        }
        Err(format!("a record of kind {kind} with {length} bytes from {start:#x} on is none of this disk"))
    }

    /// Bytes that follow it.
    pub(super) fn body_bytes(self) -> usize {
        if self.kind == DATA { self.length as usize } else { 0 }
    }
}

/// A record of which a part was read or has come. Its block is where direct I/O can take it from.
#[derive(Default)]
pub(super) struct Record {
    pub(super) header: [u8; HEADER_BYTES],
    block: Vec<u8>,
    /// How much of it was read, or has come.
    pub(super) at: usize,
    /// Its length. The destination knows it when the header has come.
    pub(super) length: usize,
}

impl Record {
    /// The first bytes of the block.
    pub(super) fn block(&mut self, length: usize) -> &mut [u8] {
        self.block.resize(BLOCK as usize + ALIGNMENT, 0);
        let from = self.block.as_ptr().align_offset(ALIGNMENT);
        &mut self.block[from..from + length]
    }

    /// Copies the next bytes of it out; how many.
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

    /// Copies bytes in, up to `end` of it; how many.
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
