//! Buffers that are used again: a new one costs a fault of each of its pages, and zeros.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::frame::DATA_BYTES;

/// Smallest buffer, in bytes. Each further class is twice as large, up to [`DATA_BYTES`].
const LEAST: usize = 4 << 10;
const CLASSES: usize = (DATA_BYTES / LEAST).ilog2() as usize + 1;
/// Most bytes that are kept without use.
const MOST_SPARE: usize = 4 << 20;

/// The spare buffers of a session at one relay. Clones are the same buffers.
#[derive(Debug, Clone, Default)]
pub struct Buffers(Arc<Mutex<Spare>>);

#[derive(Debug, Default)]
struct Spare {
    classes: [Vec<Vec<u8>>; CLASSES],
    bytes: usize,
}

impl Buffers {
    /// A buffer of at least `bytes` bytes. It has less than twice as many, or 4 KiB. Its content is left over from an earlier
    /// use. One that is larger than [`DATA_BYTES`] is new, and not used again.
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        if bytes > DATA_BYTES {
            return vec![0; bytes];
        }
        let class = class_of(bytes);
        let mut spare = self.0.lock();
        let Some(buffer) = spare.classes[class].pop() else {
            drop(spare);
            return vec![0; LEAST << class];
        };
        spare.bytes -= buffer.len();
        buffer
    }

    pub(super) fn put_back(&self, buffer: Vec<u8>) {
        let class = class_of(buffer.len());
        let mut spare = self.0.lock();
        if buffer.len() == LEAST << class && spare.bytes + buffer.len() <= MOST_SPARE {
            spare.bytes += buffer.len();
            spare.classes[class].push(buffer);
        }
    }
}

fn class_of(bytes: usize) -> usize {
    let count = bytes.div_ceil(LEAST).max(1);
    (count.next_power_of_two().ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Piece;

    #[test]
    fn buffer_comes_back_when_its_last_piece_is_dropped() {
        let buffers = Buffers::default();
        let buffer = buffers.take(100_000);
        assert_eq!(buffer.len(), 128 << 10);
        let place = buffer.as_ptr();
        let piece = Piece::of(buffer, 100_000, &buffers);
        let part = piece.part(10, 20);
        drop(piece);
        let other = buffers.take(100_000);
        assert_ne!(other.as_ptr(), place, "a part still has it");
        drop(part);
        let again = buffers.take(70_000);
        assert_eq!(again.as_ptr(), place);
    }

    #[test]
    fn spare_buffers_are_few() {
        let buffers = Buffers::default();
        let all: Vec<_> = (0..100).map(|_| Piece::of(buffers.take(DATA_BYTES), 1, &buffers)).collect();
        drop(all);
        assert_eq!(buffers.0.lock().bytes, MOST_SPARE);
        assert_eq!(
            [1, LEAST, LEAST + 1, DATA_BYTES].map(|bytes| buffers.take(bytes).len()),
            [LEAST, LEAST, 2 * LEAST, DATA_BYTES]
        );
    }
}
