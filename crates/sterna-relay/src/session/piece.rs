//! Bytes of a flow that several owners share without a copy.

use std::ops::Deref;
use std::sync::Arc;

use super::buffers::Buffers;

/// A part of a buffer.
#[derive(Debug, Clone)]
pub struct Piece {
    buffer: Arc<Buffer>,
    from: usize,
    to: usize,
}

/// A buffer that goes back to where it came from.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    home: Option<Buffers>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            home.put_back(std::mem::take(&mut self.bytes));
        }
    }
}

impl Piece {
    /// The first `length` bytes of a buffer, or all if it has fewer. When the last piece of it is dropped, `home` gets the
    /// buffer back.
    pub fn of(bytes: Vec<u8>, length: usize, home: &Buffers) -> Self {
        let to = length.min(bytes.len());
        Self { buffer: Arc::new(Buffer { bytes, home: Some(home.clone()) }), from: 0, to }
    }

    /// The bytes from `from` to `to`, both counted in this piece and limited by it.
    pub(super) fn part(&self, from: usize, to: usize) -> Self {
        let to = (self.from + to).min(self.to);
        Self { buffer: Arc::clone(&self.buffer), from: (self.from + from).min(to), to }
    }

    /// The bytes as a vector, if no other piece shares the buffer and this one has all of it.
    pub(super) fn into_owned(self) -> Result<Vec<u8>, Self> {
        let Self { buffer, from, to } = self;
        if from > 0 || to < buffer.bytes.len() {
            return Err(Self { buffer, from, to });
        }
        let taken = Arc::try_unwrap(buffer).map(|mut buffer| {
            buffer.home = None;
            std::mem::take(&mut buffer.bytes)
        });
        taken.map_err(|buffer| Self { buffer, from, to })
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer.bytes[self.from..self.to]
    }
}

impl From<Vec<u8>> for Piece {
    fn from(bytes: Vec<u8>) -> Self {
        let to = bytes.len();
        Self { buffer: Arc::new(Buffer { bytes, home: None }), from: 0, to }
    }
}
