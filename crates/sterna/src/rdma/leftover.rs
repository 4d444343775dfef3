//! Bytes of a received message that nobody has read yet.

use sterna_wire::rdma::Header;

/// The payload of the last FILE message.
#[derive(Debug, Default)]
pub(super) struct Leftover {
    message: Vec<u8>,
    at: usize,
}

impl Leftover {
    /// The payload of this message.
    pub(super) fn keep(&mut self, message: Vec<u8>) {
        *self = Self { message, at: Header::BYTES };
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at >= self.message.len()
    }

    /// Copies the next bytes out.
    pub(super) fn take(&mut self, to: &mut [u8]) -> usize {
        let left = self.message.get(self.at..).unwrap_or_default();
        let count = left.len().min(to.len());
        to[..count].copy_from_slice(&left[..count]);
        self.at += count;
        if self.is_empty() {
            *self = Self::default();
        }
        count
    }
}
