//! The division of RAM among workers.

use sterna_ram::{GuestRam, PAGE_SIZE};

/// Consecutive pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the block in [`GuestRam`].
    pub block: usize,
    /// First page in the block.
    pub first_page: u64,
    /// Number of pages in the segment.
    pub pages: u64,
}

/// The pages of one worker, numbered from 0 over all its segments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Share {
    segments: Vec<Segment>,
}

impl Share {
    /// A share of these segments, in this order.
    pub fn new(segments: Vec<Segment>) -> Self {
        Self { segments }
    }
    /// The segments, in the order of the share's page numbers.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
    /// Number of pages in all segments.
    pub fn pages(&self) -> u64 {
        self.segments.iter().map(|segment| segment.pages).sum()
    }
    /// Block index and page in the block of page `page`; `None` after the end.
    #[inline]
    pub fn locate(&self, mut page: u64) -> Option<(usize, u64)> {
        for segment in &self.segments {
            if page < segment.pages {
                return Some((segment.block, segment.first_page + page));
            }
            page -= segment.pages;
        }
        None
    }
}

/// Divides all pages of `ram`, in block order, into `workers` shares of nearly equal size.
pub fn divide(ram: &GuestRam, workers: usize) -> Vec<Share> {
    let whole: Vec<_> = ram
        .blocks()
        .iter()
        .enumerate()
        .map(|(block, b)| Segment { block, first_page: 0, pages: b.len_bytes() / PAGE_SIZE as u64 })
        .collect();
    divide_segments(&whole, workers)
}

/// Divides the pages of `whole` into `workers` shares of nearly equal size.
pub fn divide_segments(whole: &[Segment], workers: usize) -> Vec<Share> {
    let total: u64 = whole.iter().map(|segment| segment.pages).sum();
    let cut = |worker: usize| (u128::from(total) * worker as u128 / workers as u128) as u64;
    (0..workers).map(|worker| window(whole, cut(worker), cut(worker + 1))).collect()
}

fn window(whole: &[Segment], from: u64, to: u64) -> Share {
    let mut segments = Vec::new();
    let mut start = 0;
    for segment in whole {
        let end = start + segment.pages;
        let (low, high) = (from.max(start), to.min(end));
        if low < high {
            segments.push(Segment {
                block: segment.block,
                first_page: segment.first_page + (low - start),
                pages: high - low,
            });
        }
        start = end;
    }
    Share { segments }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divide_gives_every_page_to_one_worker() {
        let whole =
            [Segment { block: 0, first_page: 5, pages: 10 }, Segment { block: 1, first_page: 0, pages: 21 }];
        for workers in [1, 2, 3, 7] {
            let shares = divide_segments(&whole, workers);
            let mut pages: Vec<_> = shares
                .iter()
                .flat_map(|share| (0..share.pages()).map(|page| share.locate(page).unwrap()))
                .collect();
            assert_eq!(pages.len(), 31);
            pages.dedup();
            let expected: Vec<_> =
                (5..15).map(|page| (0, page)).chain((0..21).map(|page| (1, page))).collect();
            assert_eq!(pages, expected);
            assert_eq!(shares[0].locate(shares[0].pages()), None);
        }
    }
}
