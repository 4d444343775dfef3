//! How large a QEMU destination's chunks are (`specs/rdma.md §6.4`).

use super::chunk::ChunkSize;
use super::places::BlockRange;

/// Finds the chunk size of a QEMU destination that no monitor has told.
///
/// A request without further chunks registers the one chunk that holds its first byte, and a second request for the same
/// chunk gets the same key. So two neighbours of n MiB with the same key lie in one chunk: it has 2n MiB at least. With
/// different keys, a chunk has n MiB. The probe asks for neighbours of 1, 2, 4 … MiB until the keys differ: at most 11
/// requests. No request is wasted: each registers memory of the largest block that is needed anyway, or nothing.
///
/// It relies on no rule for safety: if a QEMU handed out another key for a chunk that it knows, the probe would find a
/// smaller size, and counts in a smaller unit register more than is asked for, never less.
#[derive(Debug, Clone)]
pub struct ChunkProbe {
    block: usize,
    length: u64,
    unit: ChunkSize,
    /// Of the memory from 0 up to `unit`, and of its neighbour if that differs.
    keys: Vec<u32>,
}

impl ChunkProbe {
    /// A probe in the largest of the blocks with these lengths.
    pub fn new(blocks: &[u64]) -> Self {
        let largest = blocks.iter().copied().enumerate().max_by_key(|(_, length)| *length);
        let (block, length) = largest.unwrap_or((0, 0));
        Self { block, length, unit: ChunkSize::LEAST, keys: Vec::new() }
    }

    /// What to ask for next, in units of [`ChunkProbe::unit`]; `None` when all is known that can be.
    pub fn next_ask(&self) -> Option<BlockRange> {
        let unit = self.unit.bytes();
        let start = match self.keys.len() {
            0 => 0,
            1 if self.unit < ChunkSize::MOST => unit,
            _ => return None,
        };
        (start < self.length).then(|| self.clipped(start, unit))
    }

    /// The key for what was asked for.
    pub fn answered(&mut self, key: u32) {
        match self.unit.twice() {
            Some(twice) if self.keys == [key] => self.unit = twice,
            _ => self.keys.push(key),
        }
    }

    /// The destination's chunk size. In a block that is shorter than two chunks: a lower bound, as good for that block.
    pub fn unit(&self) -> ChunkSize {
        self.unit
    }

    /// What has been registered, with the keys: tell [`RegistrationPlan::registered`](super::RegistrationPlan::registered).
    pub fn windows(&self) -> impl Iterator<Item = (BlockRange, u32)> {
        let unit = self.unit.bytes();
        (0..).zip(&self.keys).map(move |(index, key)| (self.clipped(index * unit, unit), *key))
    }

    fn clipped(&self, start: u64, length: u64) -> BlockRange {
        BlockRange { block: self.block, start, length: length.min(self.length - start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What a probe finds in a block of a QEMU with such chunks, and what it has asked for.
    fn find(length: u64, chunk: u64) -> (ChunkProbe, Vec<BlockRange>) {
        let mut probe = ChunkProbe::new(&[MIB, length, 64 << 10]);
        let mut asked = Vec::new();
        while let Some(range) = probe.next_ask() {
            probe.answered(1 + (range.start / chunk) as u32);
            asked.push(range);
        }
        (probe, asked)
    }

    #[test]
    fn probe_finds_every_chunk_size_and_registers_each_chunk_once() {
        for shift in 20..=30 {
            let (probe, asked) = find(8 << 30, 1 << shift);

            let chunk = 1u64 << shift;
            assert_eq!(probe.unit().bytes(), chunk);
            assert!(asked.len() <= 11 && asked.iter().all(|range| range.block == 1), "{asked:?}");
            let windows: Vec<_> = probe.windows().collect();
            let first = BlockRange { block: 1, start: 0, length: chunk };
            let second = BlockRange { start: chunk, ..first };
            match shift {
                30 => assert_eq!(windows, [(first, 1)]),
                _ => assert_eq!(windows, [(first, 1), (second, 2)]),
            }
        }
    }

    #[test]
    fn block_shorter_than_two_chunks_gives_a_bound_that_holds_for_it() {
        let (probe, asked) = find(5 * MIB, 64 * MIB);
        assert_eq!((probe.unit().bytes(), asked.len()), (8 * MIB, 4));
        let all = BlockRange { block: 1, start: 0, length: 5 * MIB };
        assert_eq!(probe.windows().collect::<Vec<_>>(), [(all, 1)]);

        let (probe, asked) = find(5 * MIB, 4 * MIB);
        assert_eq!((probe.unit().bytes(), asked.len()), (4 * MIB, 4));
        let last = BlockRange { block: 1, start: 4 * MIB, length: MIB };
        assert_eq!(probe.windows().last(), Some((last, 2)));

        assert_eq!(ChunkProbe::new(&[]).next_ask(), None);
    }

    #[test]
    fn qemu_that_never_repeats_a_key_is_taken_for_one_with_the_smallest_chunks() {
        let mut probe = ChunkProbe::new(&[8 << 30]);
        let mut key = 0;
        while probe.next_ask().is_some() {
            key += 1;
            probe.answered(key);
        }
        assert_eq!((probe.unit(), key), (ChunkSize::LEAST, 2));
    }
}
