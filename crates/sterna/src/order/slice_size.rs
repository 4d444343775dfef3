//! How much is re-armed at once, fitted to the machine.
//!
//! Re-arming costs a call for each slice, and what the kernel does for each page of it. Nothing of a slice can be read
//! before it is done, and lanes that come to it wait. And what is written after it was re-armed goes out twice, even if
//! it was not sent yet. So a slice should be large enough for a call to be worth its while, take no longer than [`MOST`],
//! and be a small part of RAM; how large that is depends on the kernel, on the page size and on how many pages are
//! dirty. QEMU has 1 GiB everywhere.

use std::time::Duration;

use super::geometry::CHUNK_PAGES;

/// A call that takes less than this is mostly the call itself.
const LEAST: Duration = Duration::from_micros(50);
/// Lanes should not wait longer than this.
const MOST: Duration = Duration::from_micros(400);

/// RAM has at least so many slices: a page is sent half a slice after it was re-armed on average, and what is written
/// to it meanwhile is sent twice.
const PARTS: u64 = 64;

/// Pages that are re-armed together: a power of two, from 8 MiB to 1 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SliceSize(u64);

impl Default for SliceSize {
    /// 64 MiB.
    fn default() -> Self {
        Self(16 * 1024)
    }
}

impl SliceSize {
    /// 8 MiB: a call for what lanes claim four times.
    pub(crate) const LEAST: Self = Self(4 * CHUNK_PAGES);
    /// 1 GiB.
    pub(crate) const MOST: Self = Self(256 * 1024);

    /// The size for a first round over so many pages, of which nothing is known: not more than 64 MiB, and no more
    /// than a part of [`PARTS`] of RAM.
    pub(crate) fn for_ram(pages: u64) -> Self {
        Self::default().at_most(pages)
    }

    /// This size, or a part of [`PARTS`] of so many pages if that is less.
    pub(crate) fn at_most(self, pages: u64) -> Self {
        let part = (pages / PARTS).checked_ilog2().map_or(0, |exponent| 1 << exponent);
        Self(self.0.min(part).max(Self::LEAST.0))
    }

    /// Pages of a slice.
    pub(crate) fn pages(self) -> u64 {
        self.0
    }

    /// The size for the next round, after one in which `slices` of this size took `time` in all.
    pub(crate) fn after(self, slices: u64, time: Duration) -> Self {
        let Some(each) = u32::try_from(slices).ok().and_then(|slices| time.checked_div(slices)) else {
            return self;
        };
        let pages = match each {
            short if short < LEAST => self.0 * 2,
            long if long > MOST => self.0 / 2,
            _ => self.0,
        };
        Self(pages.clamp(Self::LEAST.0, Self::MOST.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn after_dear_slices_come_smaller_ones_down_to_the_least() {
        let mut size = SliceSize::default();
        for _ in 0..10 {
            let next = size.after(4, US * 4000);
            assert!(next.pages() < size.pages() || size == SliceSize::LEAST);
            size = next;
        }
        assert_eq!(size, SliceSize::LEAST);
    }

    #[test]
    fn after_cheap_slices_come_larger_ones_up_to_the_most() {
        let size = (0..10).fold(SliceSize::default(), |size, _| size.after(4, US * 8));
        assert_eq!(size, SliceSize::MOST);
    }

    #[test]
    fn first_size_is_a_small_part_of_ram() {
        let sizes = [1, 300_000, 1 << 20, 1 << 30].map(|pages| SliceSize::for_ram(pages).pages());
        assert_eq!(sizes, [2048, 4096, 16_384, 16_384]);
        assert_eq!(SliceSize::MOST.at_most(1 << 24).pages(), 1 << 18);
        assert_eq!(SliceSize::MOST.at_most(1 << 22).pages(), 1 << 16);
    }

    #[test]
    fn after_a_round_without_slices_or_with_good_ones_it_stays() {
        assert_eq!(SliceSize::default().after(0, Duration::ZERO), SliceSize::default());
        assert_eq!(SliceSize::default().after(10, US * 2000), SliceSize::default());
    }
}
