//! The size of the slices that are re-armed together, adapted to the machine.
//!
//! Re-arming costs one call per slice, and the kernel's work for each page. No page of a slice can be read
//! before the call ends, and lanes that reach the slice wait. A page that is written after its re-arming is
//! sent twice, even if it was not sent before the write.
//!
//! Therefore a slice should be large enough for the cost of a call, take no longer than [`MOST`], and be a
//! small part of RAM. The best size depends on the kernel, the page size and the number of dirty pages. QEMU
//! uses 1 GiB on all machines.

use std::time::Duration;

use super::geometry::CHUNK_PAGES;

/// A shorter call consists mostly of its fixed cost.
const LEAST: Duration = Duration::from_micros(50);
/// A longer call would block lanes for too long.
const MOST: Duration = Duration::from_micros(400);

/// Smallest number of slices of RAM. On average, a page is sent half a slice after it was re-armed. If it is
/// written meanwhile, it is sent twice.
const PARTS: u64 = 64;

/// Number of pages that are re-armed together: a power of two, from 8 MiB to 1 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SliceSize(u64);

impl Default for SliceSize {
    /// 64 MiB, the largest size of a first round.
    fn default() -> Self {
        Self(16 * 1024)
    }
}

impl SliceSize {
    /// 8 MiB: one call for four chunks.
    pub(crate) const LEAST: Self = Self(4 * CHUNK_PAGES);
    /// 1 GiB, the size that QEMU uses.
    pub(crate) const MOST: Self = Self(256 * 1024);

    /// The size for the first round of a guest with `pages` pages, without earlier measurements: at most 64
    /// MiB, and at most RAM divided by [`PARTS`].
    pub(crate) fn for_ram(pages: u64) -> Self {
        Self::default().at_most(pages)
    }

    /// The smaller one of this size and `pages` divided by [`PARTS`].
    pub(crate) fn at_most(self, pages: u64) -> Self {
        let part = (pages / PARTS).checked_ilog2().map_or(0, |exponent| 1 << exponent);
        Self(self.0.min(part).max(Self::LEAST.0))
    }

    /// Number of pages of a slice.
    pub(crate) fn pages(self) -> u64 {
        self.0
    }

    /// The size for the next round. In the last one, `slices` slices of this size took `time` in total.
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
