//! Splits a stream that arrives in pieces into heads, which are returned, and bodies, which are skipped.

/// Maximum length of a head.
pub(super) const MOST_HEAD_BYTES: usize = 24;

/// Position of a stream between two heads.
#[derive(Debug, Default)]
pub(super) struct Heads {
    /// Bytes of a head that has not arrived completely.
    partial: Vec<u8>,
    /// Number of bytes to skip before the next head.
    skip: u64,
}

impl Heads {
    /// Skips `bytes` more before the next head.
    pub(super) fn skip(&mut self, bytes: u64) {
        self.skip += bytes;
    }

    /// Skips the part of the body that has arrived. True if the body is complete.
    pub(super) fn is_skipped(&mut self, bytes: &mut &[u8]) -> bool {
        let skipped = bytes.len().min(usize::try_from(self.skip).unwrap_or(usize::MAX));
        self.skip -= skipped as u64;
        *bytes = &bytes[skipped..];
        self.skip == 0
    }

    /// The next head of `length` bytes, at most [`MOST_HEAD_BYTES`], padded with 0. `None` until all of it has
    /// arrived.
    pub(super) fn next(&mut self, bytes: &mut &[u8], length: usize) -> Option<[u8; MOST_HEAD_BYTES]> {
        if !self.is_skipped(bytes) {
            return None;
        }
        let missing = length.saturating_sub(self.partial.len()).min(bytes.len());
        let (come, rest) = bytes.split_at(missing);
        self.partial.extend_from_slice(come);
        *bytes = rest;
        if self.partial.len() < length {
            return None;
        }
        let mut head = [0; MOST_HEAD_BYTES];
        head[..length].copy_from_slice(&self.partial);
        self.partial.clear();
        Some(head)
    }
}
