//! Finds the chunk size of a QEMU destination (`specs/rdma.md §6.4`).
//!
//! A request that counts in a smaller unit makes the QEMU register more memory than requested.

use super::chunk::ChunkSize;
use super::places::BlockRange;

/// Finds the chunk size of a QEMU destination when no monitor provides it.
///
/// A request without further chunks registers the one chunk that contains its first byte. A second request for
/// the same chunk returns the same key. Two adjacent ranges of n MiB with the same key therefore lie in one
/// chunk of at least 2n MiB. With different keys, a chunk has n MiB.
///
/// The probe requests adjacent ranges of 1, 2, 4 … MiB until the keys differ, with at most 11 requests. No
/// request is wasted: each registers needed memory of the largest block, or nothing.
///
/// Safety does not depend on QEMU's behaviour. If a QEMU returned a new key for a known chunk, the probe would
/// find a smaller size. Requests that count in a smaller unit register more memory than requested, never less.
#[derive(Debug, Clone)]
pub struct ChunkProbe {
    block: usize,
    length: u64,
    unit: ChunkSize,
    /// Keys of the memory from 0 to `unit`, and of the adjacent range if different.
    keys: Vec<u32>,
}

impl ChunkProbe {
    /// A probe in the largest of the blocks with these lengths.
    pub fn new(blocks: &[u64]) -> Self {
        let largest = blocks.iter().copied().enumerate().max_by_key(|(_, length)| *length);
        let (block, length) = largest.unwrap_or((0, 0));
        Self { block, length, unit: ChunkSize::LEAST, keys: Vec::new() }
    }

    /// The next request, in units of [`ChunkProbe::unit`]; `None` after the last one.
    pub fn next_ask(&self) -> Option<BlockRange> {
        let unit = self.unit.bytes();
        let start = match self.keys.len() {
            0 => 0,
            1 if self.unit < ChunkSize::MOST => unit,
            _ => return None,
        };
        (start < self.length).then(|| self.clipped(start, unit))
    }

    /// Reports the key from the answer to the last request.
    pub fn answered(&mut self, key: u32) {
        match self.unit.twice() {
            Some(twice) if self.keys == [key] => self.unit = twice,
            _ => self.keys.push(key),
        }
    }

    /// The destination's chunk size.
    ///
    /// In a block that is shorter than two chunks it is a lower bound, which is as good for that block.
    pub fn unit(&self) -> ChunkSize {
        self.unit
    }

    /// The registered windows with their keys.
    ///
    /// Report them to [`RegistrationPlan::registered`](super::RegistrationPlan::registered).
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

    /// Runs a probe against a QEMU with this chunk size. Returns the probe and its requests.
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
