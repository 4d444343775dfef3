//! Estimates the chunk size of a QEMU source from its requests.

use std::collections::BTreeMap;

use sterna_wire::rdma::ChunkSize;

/// An upper bound of a QEMU source's chunk size.
///
/// A QEMU requests the byte that it wants to write first, and then writes anywhere in its chunk around that
/// byte. It does not announce its chunk size. But it requests each chunk only once. Two requested bytes
/// therefore lie in different chunks, which bounds the size. Until the second request, only the largest
/// possible size is known.
#[derive(Debug)]
pub(super) struct SourceChunk {
    /// By block and MiB within the block: the offset of the first requested byte. A chunk has at least 1 MiB,
    /// so further bytes in the same MiB give no information. The map has at most one entry per MiB of the
    /// source's RAM.
    asked: BTreeMap<(usize, u64), u64>,
    most: ChunkSize,
}

impl Default for SourceChunk {
    fn default() -> Self {
        Self { asked: BTreeMap::new(), most: ChunkSize::MOST }
    }
}

impl SourceChunk {
    /// Updates the bound from a request. Returns the largest size that the source's chunks can have.
    pub(super) fn asked_for(&mut self, block: usize, offset: u64) -> ChunkSize {
        let unit = offset / ChunkSize::LEAST.bytes();
        let before = self.asked.range((block, 0)..(block, unit)).next_back();
        let at = self.asked.get_key_value(&(block, unit)).filter(|(_, first)| **first != offset);
        let after = self.asked.range((block, unit + 1)..=(block, u64::MAX)).next();
        for (_, other) in [before, at, after].into_iter().flatten() {
            // The highest bit in which the offsets differ: a larger chunk would contain both.
            let bit = 63 - (offset ^ other).leading_zeros();
            let bytes = (1 << bit.min(30)).max(ChunkSize::LEAST.bytes());
            self.most = self.most.min(ChunkSize::new(bytes).unwrap_or(self.most));
        }
        self.asked.entry((block, unit)).or_insert(offset);
        self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn bound_is_never_below_the_source_s_chunk_size_and_finds_it_in_full_memory() {
        let mut random = fastrand::Rng::with_seed(3);
        for shift in 20..=30 {
            let chunk: u64 = 1 << shift;
            for density in [1, 3, 100] {
                let mut source = SourceChunk::default();
                let mut least = ChunkSize::MOST;
                let mut order: Vec<u64> = (0..(8 << 30) / chunk).collect();
                random.shuffle(&mut order);
                for number in order.into_iter().take(3000) {
                    if random.u64(0..density) > 0 {
                        continue;
                    }
                    let most = source.asked_for(1, number * chunk + random.u64(0..chunk));
                    assert!(most.bytes() >= chunk, "{most} and the source's is {chunk}");
                    least = least.min(most);
                }
                let is_full = density == 1 && shift >= 22;
                assert!(!is_full || least.bytes() == chunk, "{least} and the source's is {chunk}");
            }
        }
    }

    #[test]
    fn source_that_asks_for_every_byte_costs_one_entry_for_each_mib() {
        let mut source = SourceChunk::default();
        for offset in 0..3 * MIB / 16 {
            source.asked_for(0, 16 * offset);
        }
        assert_eq!((source.asked.len(), source.most), (3, ChunkSize::LEAST));
    }

    #[test]
    fn first_request_says_nothing_and_blocks_are_apart() {
        let mut source = SourceChunk::default();
        assert_eq!(source.asked_for(0, 0), ChunkSize::MOST);
        assert_eq!(source.asked_for(1, MIB), ChunkSize::MOST);
        // A source that requests one byte twice does not lower the bound.
        assert_eq!(source.asked_for(1, MIB), ChunkSize::MOST);
        assert_eq!(source.asked_for(1, 6 * MIB + 5).bytes(), 4 * MIB);
        assert_eq!(source.asked_for(0, 5), ChunkSize::LEAST);
    }
}
