//! Bytes of a flow that several owners share without a copy.

use std::ops::Deref;
use std::sync::Arc;

/// A part of a buffer.
#[derive(Debug, Clone)]
pub struct Piece {
    buffer: Arc<Vec<u8>>,
    from: usize,
    to: usize,
}

impl Piece {
    /// The first `length` bytes of `buffer`, or all if it has fewer.
    pub fn new(buffer: Vec<u8>, length: usize) -> Self {
        let to = length.min(buffer.len());
        Self { buffer: Arc::new(buffer), from: 0, to }
    }

    /// The bytes from `from` to `to`, both counted in this piece and limited by it.
    pub(super) fn part(&self, from: usize, to: usize) -> Self {
        let to = (self.from + to).min(self.to);
        Self { buffer: Arc::clone(&self.buffer), from: (self.from + from).min(to), to }
    }

    /// The bytes as a vector, if no other piece shares the buffer and this one has all of it.
    pub(super) fn into_owned(self) -> Result<Vec<u8>, Self> {
        let Self { buffer, from, to } = self;
        if from > 0 || to < buffer.len() {
            return Err(Self { buffer, from, to });
        }
        Arc::try_unwrap(buffer).map_err(|buffer| Self { buffer, from, to })
    }

    /// The buffer, if no other piece shares it.
    pub fn into_buffer(self) -> Option<Vec<u8>> {
        Arc::try_unwrap(self.buffer).ok()
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.from..self.to]
    }
}

impl From<Vec<u8>> for Piece {
    fn from(buffer: Vec<u8>) -> Self {
        let length = buffer.len();
        Self::new(buffer, length)
    }
}
