//! The acts of steps: a step writes words, stores zeros, or gives memory back to the host.

use super::pattern::hash;

/// The effect of a step on the page that its pattern names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Act {
    /// The step writes its words.
    Write,
    /// The step stores zeros over the whole page, in ascending order.
    Zero,
    /// The step gives the page back to the host, like a guest that reports free memory. The page then reads
    /// as zero, without a write of a vCPU.
    Discard,
    /// The step gives [`BALLOON_PAGES`] pages back, like a balloon that grows.
    ///
    /// These are this page and the pages after it in the working set.
    Balloon,
}

/// Number of pages that one [`Act::Balloon`] gives back, limited by the end of the working set.
pub const BALLOON_PAGES: u64 = 32;

/// How many of 256 steps do not write words. Seed and step determine which steps these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Acts {
    zero: u8,
    discard: u8,
    balloon: u8,
}

/// A different seed, so that the acts do not correlate with the pages that [`hash`] chooses.
const OTHER_SEED: u64 = 0x5a45_524f_5041_4745;

impl Acts {
    /// Every step writes words.
    pub const WRITES: Self = Self { zero: 0, discard: 0, balloon: 0 };
    /// Of 256 steps, 40 store zeros, 24 give a page back and 2 grow a balloon. Four of ten pages become
    /// zero.
    pub const MIXED: Self = Self { zero: 40, discard: 24, balloon: 2 };

    /// This many steps of 256 store zeros, give a page back, or give many back.
    ///
    /// `None` unless at least a quarter of the steps writes words.
    pub fn new(zero: u8, discard: u8, balloon: u8) -> Option<Self> {
        let sum = u32::from(zero) + u32::from(discard) + u32::from(balloon);
        (sum <= 192).then_some(Self { zero, discard, balloon })
    }

    /// Numbers of steps of 256 that store zeros, give a page back, or give many back.
    pub fn of_256(self) -> [u8; 3] {
        [self.zero, self.discard, self.balloon]
    }

    /// Whether any step can zero a page.
    pub fn zeroes(self) -> bool {
        self != Self::WRITES
    }

    /// The act of `step` of the worker with this seed.
    #[inline]
    pub fn act(self, seed: u64, step: u64) -> Act {
        if !self.zeroes() {
            return Act::Write;
        }
        // The sum below does not overflow, because it is at most 192.
        let drawn = (hash(Self::seed(seed), step) & 0xff) as u8;
        let (discard, balloon) = (self.zero + self.discard, self.zero + self.discard + self.balloon);
        match drawn {
            drawn if drawn < self.zero => Act::Zero,
            drawn if drawn < discard => Act::Discard,
            drawn if drawn < balloon => Act::Balloon,
            _ => Act::Write,
        }
    }

    /// The seed of a worker's acts, derived from the seed of its pages.
    pub fn seed(seed: u64) -> u64 {
        seed ^ OTHER_SEED
    }
}

impl Act {
    /// Number of pages that the act changes, beginning with `page`, in a working set.
    pub fn pages(self, page: u64, working_set_pages: u64) -> u64 {
        match self {
            Self::Balloon => BALLOON_PAGES.min(working_set_pages.saturating_sub(page)),
            Self::Write | Self::Zero | Self::Discard => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acts_come_as_often_as_they_are_to() {
        let mut counts = std::collections::BTreeMap::new();
        (1..=256_000).for_each(|step| *counts.entry(Acts::MIXED.act(7, step)).or_insert(0u32) += 1);
        for (act, of_256) in [(Act::Zero, 40), (Act::Discard, 24), (Act::Balloon, 2), (Act::Write, 190)] {
            let (found, due) = (counts[&act], of_256 * 1000);
            assert!(found.abs_diff(due) < due / 5 + 100, "{act:?}: {found} instead of {due}");
        }
    }

    #[test]
    fn acts_that_leave_too_few_words_are_refused() {
        assert_eq!(Acts::new(100, 92, 1), None);
        assert_eq!(Acts::new(100, 92, 0).map(Acts::of_256), Some([100, 92, 0]));
        assert!((0..1000).all(|step| Acts::WRITES.act(3, step) == Act::Write));
    }
}
