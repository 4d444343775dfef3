//! How much is re-armed at once, fitted to the machine.
//!
//! Re-arming costs a call for each slice, and what the kernel does for each page of it. Nothing of a slice can be read
//! before it is done, and lanes that come to it wait. So a slice should be as large as possible and take no longer than
//! [`MOST`]; how large that is depends on the kernel, on the page size and on how many pages are dirty. QEMU has 1 GiB
//! everywhere.

use std::time::Duration;

/// A call that takes less than this is mostly the call itself.
const LEAST: Duration = Duration::from_micros(50);
/// Lanes should not wait longer than this.
const MOST: Duration = Duration::from_micros(400);

/// Pages that are re-armed together: a power of two, from 8 MiB to 1 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceSize(u64);

impl Default for SliceSize {
    /// 64 MiB, for a first pass, of which nothing is known.
    fn default() -> Self {
        Self(16 * 1024)
    }
}

impl SliceSize {
    /// 8 MiB.
    pub const LEAST: Self = Self(2 * 1024);
    /// 1 GiB.
    pub const MOST: Self = Self(256 * 1024);

    /// Pages of a slice.
    pub fn pages(self) -> u64 {
        self.0
    }

    /// The size for the next pass, after one in which `slices` of this size took `time` in all.
    pub fn after(self, slices: u64, time: Duration) -> Self {
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
    fn after_a_pass_without_slices_or_with_good_ones_it_stays() {
        assert_eq!(SliceSize::default().after(0, Duration::ZERO), SliceSize::default());
        assert_eq!(SliceSize::default().after(10, US * 2000), SliceSize::default());
    }
}
