//! Which blocks of a disk have to be copied still.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

/// Bytes of a block.
pub(super) const BLOCK: u64 = 64 << 10;

/// A bit for each block. While nobody copies, nothing is noted, and there are no bits.
#[derive(Default)]
pub(super) struct Changes {
    is_tracking: AtomicBool,
    bits: RwLock<Bits>,
}

#[derive(Default)]
struct Bits {
    words: Vec<AtomicU64>,
    /// Of the disk.
    len_bytes: u64,
}

impl Changes {
    /// From now on what is written to a disk of so many bytes is noted; nothing is so far.
    pub(super) fn track(&self, len_bytes: u64) {
        let words = len_bytes.div_ceil(BLOCK).div_ceil(64);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        *self.bits.write() = Bits { words, len_bytes };
        self.is_tracking.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_tracking(&self) -> bool {
        self.is_tracking.load(Ordering::SeqCst)
    }

    pub(super) fn end(&self) {
        self.is_tracking.store(false, Ordering::SeqCst);
        *self.bits.write() = Bits::default();
    }

    /// The guest has written here: call it when it is done, since whoever copies may have read before.
    pub(super) fn written(&self, start: u64, length: u64) {
        if self.is_tracking() {
            self.note(start, length);
        }
    }

    /// Notes the blocks that these bytes are in.
    pub(super) fn note(&self, start: u64, length: u64) {
        let bits = self.bits.read();
        let end = start.saturating_add(length).min(bits.len_bytes);
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            bits.words[block as usize / 64].fetch_or(1 << (block % 64), Ordering::SeqCst);
        }
    }

    /// Takes the first noted block from block `from` on: its number, and where it begins and how long it is.
    pub(super) fn take(&self, from: u64) -> Option<(u64, u64, u64)> {
        let bits = self.bits.read();
        let first = from as usize / 64;
        for (index, word) in bits.words.iter().enumerate().skip(first) {
            let mask = if index == first { u64::MAX << (from % 64) } else { u64::MAX };
            let found = word.load(Ordering::SeqCst) & mask;
            if found != 0 {
                let bit = found.trailing_zeros();
                // Before the block is read: what is written after this is noted again.
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                let block = index as u64 * 64 + u64::from(bit);
                let start = block * BLOCK;
                return Some((block, start, BLOCK.min(bits.len_bytes - start)));
            }
        }
        None
    }

    /// Bytes of the blocks that are noted.
    pub(super) fn bytes(&self) -> u64 {
        let bits = self.bits.read();
        let blocks: u32 = bits.words.iter().map(|word| word.load(Ordering::SeqCst).count_ones()).sum();
        (u64::from(blocks) * BLOCK).min(bits.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_in_order_and_once() {
        let changes = Changes::default();
        changes.written(0, 512);
        assert_eq!(changes.bytes(), 0, "nobody copies");
        changes.track(70 * BLOCK + 512);
        changes.written(3 * BLOCK - 1, 2);
        changes.written(70 * BLOCK, 512);
        changes.written(65 * BLOCK, BLOCK);

        assert_eq!(changes.bytes(), 4 * BLOCK);
        assert_eq!(changes.take(3), Some((3, 3 * BLOCK, BLOCK)));
        assert_eq!(changes.take(4), Some((65, 65 * BLOCK, BLOCK)));
        assert_eq!(changes.take(66), Some((70, 70 * BLOCK, 512)));
        assert_eq!((changes.take(66), changes.take(0)), (None, Some((2, 2 * BLOCK, BLOCK))));
        assert_eq!(changes.take(0), None);
    }
}
