//! One bit for each page of a block. Memory is allocated only for chunks with a set bit.
//!
//! A stream of some hundred bytes can announce blocks of 32 TiB. Their bits would take 1 GiB. Therefore a chunk of
//! bits is allocated when its first bit is set.

use std::sync::OnceLock;

use sterna_ram::PageBitmap;

/// Pages in a chunk: 1 MiB of bits, for 32 GiB of RAM.
pub(super) const CHUNK: u64 = 8 << 20;

/// The bits of a block; any thread may change them.
pub(super) struct Bits {
    pages: u64,
    chunks: Vec<OnceLock<PageBitmap>>,
}

impl Bits {
    pub(super) fn new(pages: u64) -> Self {
        Self { pages, chunks: (0..pages.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    pub(super) fn get(&self, page: u64) -> bool {
        assert!(page < self.pages, "the page is in the block");
        self.chunk(page / CHUNK).is_some_and(|chunk| chunk.get(page % CHUNK))
    }

    /// Sets bits, and returns the number of bits that were clear before.
    pub(super) fn set_range(&self, first: u64, count: u64) -> u64 {
        let set = |(index, first, count): (u64, u64, u64)| {
            let pages = CHUNK.min(self.pages - index * CHUNK);
            let chunk = self.chunks[index as usize].get_or_init(|| PageBitmap::new(pages));
            chunk.set_range(first, count)
        };
        self.parts(first, count).map(set).sum()
    }

    pub(super) fn clear_range(&self, first: u64, count: u64) {
        for (index, first, count) in self.parts(first, count) {
            if let Some(chunk) = self.chunk(index) {
                chunk.clear_range(first, count);
            }
        }
    }

    /// Number of set bits.
    pub(super) fn count(&self) -> u64 {
        self.made().map(|(_, chunk)| chunk.count()).sum()
    }

    /// The allocated chunks with their numbers.
    pub(super) fn made(&self) -> impl Iterator<Item = (u64, &PageBitmap)> {
        (0..).zip(&self.chunks).filter_map(|(index, chunk)| Some((index, chunk.get()?)))
    }

    /// Chunk number `index`, if it is allocated.
    pub(super) fn chunk(&self, index: u64) -> Option<&PageBitmap> {
        self.chunks.get(index as usize)?.get()
    }

    /// Splits a range by chunks: chunk number, first page in the chunk, count.
    fn parts(&self, first: u64, count: u64) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
        let end = first.checked_add(count).filter(|end| *end <= self.pages);
        let Some(end) = end else { panic!("pages {first} and {count} more are not in the block") };
        let mut at = first;
        std::iter::from_fn(move || {
            let stop = ((at / CHUNK + 1) * CHUNK).min(end);
            let part = (at / CHUNK, at % CHUNK, stop.saturating_sub(at));
            at = stop;
            (part.2 > 0).then_some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_over_chunks_are_set_and_cleared_and_cost_memory_only_there() {
        let bits = Bits::new(CHUNK * 1000 + 5);
        bits.clear_range(0, CHUNK * 1000);
        assert_eq!(bits.made().count(), 0);

        assert_eq!(bits.set_range(CHUNK * 7 - 3, CHUNK + 5), CHUNK + 5);
        assert_eq!(bits.set_range(CHUNK * 1000 + 4, 1), 1);
        bits.clear_range(CHUNK * 7, 10);

        assert_eq!(bits.set_range(CHUNK * 7 - 1, 2), 1);
        assert_eq!((bits.count(), bits.made().count()), (CHUNK + 5 + 1 - 9, 4));
        assert!(bits.get(CHUNK * 7) && !bits.get(CHUNK * 7 + 1) && bits.get(CHUNK * 8 + 1));
        assert!(!bits.get(CHUNK * 8 + 2) && !bits.get(0) && bits.get(CHUNK * 1000 + 4));
    }

    #[test]
    #[should_panic(expected = "not in the block")]
    fn bits_behind_the_last_page_panic() {
        Bits::new(5).set_range(4, 2);
    }
}
