//! Which blocks of a disk have to be copied still.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a block.
pub(super) const BLOCK: u64 = 64 << 10;

/// A bit for each block. While nobody copies, nothing is noted.
pub(super) struct Changes {
    is_tracking: AtomicBool,
    words: Vec<AtomicU64>,
    len_bytes: u64,
}

impl Changes {
    /// Of a disk of so many bytes.
    pub(super) fn new(len_bytes: u64) -> Self {
        let words = len_bytes.div_ceil(BLOCK).div_ceil(64);
        Self {
            is_tracking: AtomicBool::new(false),
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            len_bytes,
        }
    }

    /// From now on what is written is noted; nothing is so far.
    pub(super) fn track(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        self.is_tracking.store(true, Ordering::SeqCst);
    }

    pub(super) fn end(&self) {
        self.is_tracking.store(false, Ordering::SeqCst);
    }

    /// The guest has written here: call it when it is done, since whoever copies may have read before.
    pub(super) fn written(&self, start: u64, length: u64) {
        if self.is_tracking.load(Ordering::SeqCst) {
            self.note(start, length);
        }
    }

    /// Notes the blocks that these bytes are in.
    pub(super) fn note(&self, start: u64, length: u64) {
        let end = start.saturating_add(length).min(self.len_bytes);
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            self.words[block as usize / 64].fetch_or(1 << (block % 64), Ordering::SeqCst);
        }
    }

    /// Takes the first noted block from block `from` on: its number, and where it begins and how long it is.
    pub(super) fn take(&self, from: u64) -> Option<(u64, u64, u64)> {
        let first = from as usize / 64;
        for (index, word) in self.words.iter().enumerate().skip(first) {
            let mask = if index == first { u64::MAX << (from % 64) } else { u64::MAX };
            let found = word.load(Ordering::SeqCst) & mask;
            if found != 0 {
                let bit = found.trailing_zeros();
                // Before the block is read: what is written after this is noted again.
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                let block = index as u64 * 64 + u64::from(bit);
                let start = block * BLOCK;
                return Some((block, start, BLOCK.min(self.len_bytes - start)));
            }
        }
        None
    }

    /// Bytes of the blocks that are noted.
    pub(super) fn bytes(&self) -> u64 {
        let blocks: u32 = self.words.iter().map(|word| word.load(Ordering::SeqCst).count_ones()).sum();
        (u64::from(blocks) * BLOCK).min(self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_in_order_and_once() {
        let changes = Changes::new(70 * BLOCK + 512);
        changes.written(0, 512);
        assert_eq!(changes.bytes(), 0, "nobody copies");
        changes.track();
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
