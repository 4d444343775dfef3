//! The unread bytes of a received message.

use sterna_wire::rdma::Header;

/// The payload of the last FILE message, and the position of the next unread byte.
#[derive(Debug, Default)]
pub(super) struct Leftover {
    message: Vec<u8>,
    at: usize,
}

impl Leftover {
    /// Stores a message whose payload is read next.
    pub(super) fn keep(&mut self, message: Vec<u8>) {
        *self = Self { message, at: Header::BYTES };
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at >= self.message.len()
    }

    /// Copies the next bytes into `to`. Returns their number.
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
