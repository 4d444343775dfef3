//! Operations that need exclusive access to a bitmap.
//!
//! They use plain loads and stores, in vectors and on several threads, instead of one atomic instruction per
//! word.

use super::{PageBitmap, staged};
use crate::atomic;
use crate::merge::{self, Method, Shifted};

impl PageBitmap {
    /// Sets every bit that is set in `words`, whose bit 0 is page `first_page` here.
    ///
    /// `first_page` needs no alignment. Bits after the last page are ignored. Returns how many bits were clear
    /// before.
    pub fn merge_words(&mut self, first_page: u64, words: &[u64]) -> u64 {
        if first_page >= self.pages {
            return 0;
        }
        let valid = self.valid(self.words.len() - 1);
        let from = Shifted::new(words, (first_page % 64) as u32);
        self.with_words(|all| {
            let into = &mut all[(first_page / 64) as usize..];
            // Only the last word can contain bits after the last page.
            let Some((last, before)) = into.split_last_mut() else { return 0 };
            let newly = merge::merge(before, from);
            newly + merge::add(last, from.word(before.len()) & valid)
        })
    }

    /// Sets every bit that is set in `other`, which other threads may change meanwhile.
    ///
    /// Returns how many bits were clear before.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn or_from(&mut self, other: &PageBitmap) -> u64 {
        assert_eq!(self.pages, other.pages, "only bitmaps of the same block can be merged");
        self.with_words(|words| {
            staged(&other.words, |first, bits| {
                Method::best().merge(&mut words[first..first + bits.len()], Shifted::new(bits, 0))
            })
        })
    }

    /// Sets the bits of `[first, first + count)` and returns how many were clear.
    ///
    /// It does the same as [`PageBitmap::set_range`] without atomic instructions.
    pub fn add_range(&mut self, first: u64, count: u64) -> u64 {
        // Most runs that a scan reports have few pages and lie in one word.
        let (index, bit) = ((first / 64) as usize, (first % 64) as u32);
        if (1..=u64::from(64 - bit)).contains(&count) && first.saturating_add(count) <= self.pages {
            let mask = (u64::MAX >> (64 - count)) << bit;
            return self.with_words(|words| merge::add(&mut words[index], mask));
        }
        let masks = self.masks(first, count);
        self.with_words(|words| masks.map(|(index, mask)| merge::add(&mut words[index], mask)).sum())
    }

    /// Clears every bit that is set in `sent`, which other threads may change meanwhile.
    ///
    /// Returns how many of them were set here. See [`crate::DirtyBitmaps::drop_reported`].
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn drop_reported(&mut self, sent: &PageBitmap) -> u64 {
        assert_eq!(self.pages, sent.pages, "only bitmaps of the same block can be merged");
        self.with_words(|words| {
            staged(&sent.words, |first, bits| {
                Method::best().clear(&mut words[first..first + bits.len()], bits)
            })
        })
    }

    /// Calls `work` with the words as plain integers. `work` must not set bits after the last page.
    pub(crate) fn with_words<T>(&mut self, work: impl FnOnce(&mut [u64]) -> T) -> T {
        atomic::with_words(&mut self.words, work)
    }
}
