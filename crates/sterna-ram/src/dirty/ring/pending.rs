//! The pages that dirty rings have named since the last sync.
//!
//! A list names the words of the bitmaps that contain bits. The cost of a sync therefore depends on the number
//! of entries instead of the guest's size. Once the list is so long that a scan of the whole bitmaps is
//! cheaper, it is not extended until the next sync.

use crate::dirty::bitmaps::DirtyBitmaps;
use crate::guest::GuestRam;
use crate::merge;

/// Number of bitmap words that are read in the time of one listed word.
const WORDS_PER_LISTED: u64 = 8;

#[derive(Debug)]
pub(super) struct Pending {
    bitmaps: DirtyBitmaps,
    /// Block and word index of each word that is not zero; incomplete if `is_crowded`.
    listed: Vec<(usize, usize)>,
    most_listed: usize,
    /// Whether some words with bits are not listed.
    is_crowded: bool,
}

impl Pending {
    pub(super) fn new(ram: &GuestRam) -> Self {
        let words: u64 = ram.blocks().iter().map(|block| block.pages().div_ceil(64)).sum();
        let most_listed = usize::try_from(words / WORDS_PER_LISTED).unwrap_or(usize::MAX);
        Self { bitmaps: DirtyBitmaps::new(ram), listed: Vec::new(), most_listed, is_crowded: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.listed.is_empty() && !self.is_crowded
    }

    /// Makes a page pending, and returns whether it was not pending before.
    ///
    /// # Panics
    /// If there is no such page.
    pub(super) fn add(&mut self, block: usize, page: u64) -> bool {
        let bitmap = self.bitmaps.block_mut(block);
        assert!(page < bitmap.pages(), "page {page} is not in block {block} of {} pages", bitmap.pages());
        let (index, bit) = ((page / 64) as usize, 1 << (page % 64));
        let before = bitmap.with_words(|words| {
            let before = words[index];
            words[index] |= bit;
            before
        });
        if before == 0 {
            if self.listed.len() < self.most_listed {
                self.listed.push((block, index));
            } else {
                self.is_crowded = true;
            }
        }
        before & bit == 0
    }

    /// Moves all pages into `into`, and returns how many were clear there.
    ///
    /// `into` must belong to the same RAM.
    pub(super) fn move_into(&mut self, into: &mut DirtyBitmaps) -> u64 {
        if self.is_crowded {
            let newly = into.or_from(&self.bitmaps);
            self.clear();
            return newly;
        }
        let mut newly = 0;
        for (block, index) in self.listed.drain(..) {
            let bits = self.bitmaps.block_mut(block).with_words(|words| std::mem::take(&mut words[index]));
            newly += into.block_mut(block).with_words(|words| merge::add(&mut words[index], bits));
        }
        newly
    }

    pub(super) fn clear(&mut self) {
        if self.is_crowded {
            self.bitmaps.clear_all();
        } else {
            for (block, index) in &self.listed {
                self.bitmaps.block_mut(*block).with_words(|words| words[*index] = 0);
            }
        }
        self.listed.clear();
        self.is_crowded = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_SIZE, RamBlock};

    fn ram() -> GuestRam {
        let block = |name, pages: u64| RamBlock::without_memory(name, pages * PAGE_SIZE as u64).unwrap();
        GuestRam::new(vec![block("a", 64 * 100 + 7), block("b", 64 * 60)]).unwrap()
    }

    /// Returns pages of both blocks in turn.
    fn pages(count: u64) -> impl Iterator<Item = (usize, u64)> {
        (0..count).map(|n| ((n % 2) as usize, n / 2 * 2_654_435_761 % (64 * 60)))
    }

    #[test]
    fn pending_few_or_many_pages_are_moved_once_and_counted() {
        let ram = ram();
        let mut pending = Pending::new(&ram);
        // Few pages are listed; later counts exceed the list.
        for count in [1, 10, 30, 3000, 5] {
            let mut into = DirtyBitmaps::new(&ram);
            into.block(0).set(0);
            let expected = DirtyBitmaps::new(&ram);
            for (block, page) in pages(count) {
                assert_eq!(pending.add(block, page), !expected.block(block).set(page), "{block}, {page}");
            }
            let had_0 = expected.block(0).set(0);

            let newly = pending.move_into(&mut into);

            assert_eq!(into.count(), expected.count(), "{count}");
            assert_eq!(into.drop_reported(&expected), expected.count(), "{count}: the same pages");
            assert_eq!(newly, expected.count() - 1, "{count}, {had_0}");
            assert!(pending.is_empty() && pending.bitmaps.count() == 0, "{count}");
            assert_eq!(pending.move_into(&mut into), 0);
        }
    }

    #[test]
    fn pending_list_is_as_long_as_the_words_with_pages() {
        let ram = ram();
        let mut pending = Pending::new(&ram);
        for page in [3, 5, 63, 64, 3] {
            pending.add(0, page);
        }
        pending.add(1, 3);

        assert_eq!(pending.listed, [(0, 0), (0, 1), (1, 0)]);
    }

    #[test]
    fn pending_forgotten_few_or_many_are_none() {
        let ram = ram();
        for count in [3, 3000] {
            let mut pending = Pending::new(&ram);
            pages(count).for_each(|(block, page)| {
                pending.add(block, page);
            });
            assert!(!pending.is_empty());

            pending.clear();

            assert!(pending.is_empty());
            assert_eq!(pending.bitmaps.count(), 0);
        }
    }
}
