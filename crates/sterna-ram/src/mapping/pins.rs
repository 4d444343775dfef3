//! Byte ranges of a mapping that must keep their pages, which an adapter has registered.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of byte ranges. Ranges may overlap and repeat.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// The end of each range; the key is its first byte and a unique number.
    ends: BTreeMap<(u64, u64), u64>,
    /// Length of the longest range that was ever added.
    longest: u64,
    numbers: u64,
}

impl Pins {
    /// Adds a range and returns the key for [`Pins::remove`].
    pub(crate) fn add(&mut self, range: Range<u64>) -> (u64, u64) {
        self.numbers += 1;
        self.longest = self.longest.max(range.end.saturating_sub(range.start));
        let key = (range.start, self.numbers);
        self.ends.insert(key, range.end);
        key
    }

    pub(crate) fn remove(&mut self, key: (u64, u64)) {
        self.ends.remove(&key);
    }

    /// Returns the first part of `range` that one of the pins covers.
    pub(crate) fn first_in(&self, range: Range<u64>) -> Option<Range<u64>> {
        if range.is_empty() {
            return None;
        }
        // Ranges that begin before this byte are too short to reach `range`.
        let earliest = range.start.saturating_sub(self.longest);
        let mut near = self.ends.range((earliest, 0)..(range.end, 0));
        let found = near.find(|(_, end)| **end > range.start);
        found.map(|((start, _), end)| (*start).max(range.start)..(*end).min(range.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_part_of_a_range_is_found_as_by_looking_at_all() {
        let mut random = fastrand::Rng::with_seed(14);
        for _ in 0..200 {
            let mut pins = Pins::default();
            let mut all = Vec::new();
            for _ in 0..random.usize(0..8) {
                let start = random.u64(0..90);
                let range = start..start + random.u64(1..10);
                all.push((pins.add(range.clone()), range));
            }
            for _ in 0..all.len() / 2 {
                let (key, _) = all.swap_remove(random.usize(0..all.len()));
                pins.remove(key);
            }
            for start in 0..100 {
                let asked = start..start + random.u64(0..20);
                let first = asked.clone().find(|byte| all.iter().any(|(_, range)| range.contains(byte)));

                let found = pins.first_in(asked.clone());

                assert_eq!(found.as_ref().map(|found| found.start), first, "{asked:?} in {all:?}");
                let is_whole = |found: Range<u64>| {
                    found.clone().all(|byte| all.iter().any(|(_, range)| range.contains(&byte)))
                        && found.end <= asked.end
                };
                assert!(found.is_none_or(is_whole), "{asked:?} in {all:?}");
            }
        }
    }
}
