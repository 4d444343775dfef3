//! The content of a page before a step has written it.

use super::words::{PAGE_FACTOR, PageId, PageWords, SLOT_FACTOR, WORDS_PER_PAGE, fold, inverse};

/// The content of RAM at the guest's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fill {
    /// Zero and never touched, so that the guest stays sparse.
    Zero,
    /// Words from this seed, which no codec can compress.
    Random(u64),
    /// Alternately 64 pages of [`Fill::Random`] and 64 pages of [`Fill::Zero`].
    Half(u64),
}

impl Fill {
    /// Whether page `id` is zero and never touched.
    pub fn is_zero(self, id: PageId) -> bool {
        match self {
            Self::Zero => true,
            Self::Random(_) => false,
            Self::Half(_) => id.page() >> 6 & 1 == 1,
        }
    }

    /// Overwrites `page` with the fill of page `id`.
    pub fn put(self, id: PageId, page: &mut PageWords) {
        match self {
            Self::Random(seed) | Self::Half(seed) if !self.is_zero(id) => {
                let mut sum = key(seed).wrapping_add(id.0.wrapping_mul(PAGE_FACTOR));
                for word in page {
                    *word = scramble(sum);
                    sum = sum.wrapping_add(SLOT_FACTOR);
                }
            }
            _ => *page = [0; WORDS_PER_PAGE],
        }
    }

    /// The page whose fill has `found` at `slot`; `None` if all fills are equal.
    ///
    /// The result is meaningful only if that page exists.
    pub fn page_of(self, found: u64, slot: usize) -> Option<PageId> {
        let (Self::Random(seed) | Self::Half(seed)) = self else { return None };
        let sum = fold(found).wrapping_mul(inverse(SCRAMBLE));
        let rest = sum.wrapping_sub(key(seed)).wrapping_sub((slot as u64).wrapping_mul(SLOT_FACTOR));
        Some(PageId(rest.wrapping_mul(inverse(PAGE_FACTOR))))
    }
}

const SCRAMBLE: u64 = 0xbf58_476d_1ce4_e5b9;

/// The key of a seed, which separates fills from the words of step 0.
fn key(seed: u64) -> u64 {
    fold(seed.wrapping_add(0x1234_5678_9abc_def1).wrapping_mul(SCRAMBLE))
}

#[inline]
fn scramble(x: u64) -> u64 {
    fold(x.wrapping_mul(SCRAMBLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_word_inverted_gives_its_page() {
        let fill = Fill::Random(42);
        let mut page = [0; WORDS_PER_PAGE];
        let id = PageId::new(3, 777);
        fill.put(id, &mut page);
        for slot in [0, 1, 300, 511] {
            assert_eq!(fill.page_of(page[slot], slot), Some(id));
        }
    }

    #[test]
    fn half_fill_is_zero_on_every_second_group() {
        let fill = Fill::Half(1);
        let zero: Vec<_> = (0..256).filter(|&page| fill.is_zero(PageId::new(0, page))).collect();
        assert_eq!(zero, (64..128).chain(192..256).collect::<Vec<_>>());
        let mut page = [9; WORDS_PER_PAGE];
        fill.put(PageId::new(0, 64), &mut page);
        assert_eq!(page, [0; WORDS_PER_PAGE]);
    }
}
