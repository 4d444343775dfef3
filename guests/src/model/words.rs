//! The words of a page: the value that a step writes, and the inverse, which finds the writer of a word.
//!
//! `word(step, page, slot) = fold(step·A + page·B + slot·C)` modulo 2⁶⁴ with odd A, B, C and the involution
//! `fold(x) = x ^ (x >> 32)`. The function is cheap for a guest that is emulated instruction by
//! instruction, even in real mode: additions and one xor. It is so random that no codec compresses a full
//! page. It is invertible: from a wrong word the checker finds the step or the page to which it belongs.

/// Number of 64-bit words in a page.
pub const WORDS_PER_PAGE: usize = sterna_ram::PAGE_SIZE / 8;
/// Factor of the step number in a word.
pub const STEP_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// Factor of the page's identity in a word.
pub const PAGE_FACTOR: u64 = 0xd1b5_4a32_d192_ed03;
/// Factor of the word's position in the page.
pub const SLOT_FACTOR: u64 = 0x8cb9_2ba7_2f3d_8dd7;
/// Bit position of the worker's number in a [`PageId`].
pub const WORKER_SHIFT: u32 = 40;

/// The content of a page as words, which are little endian in memory.
pub type PageWords = [u64; WORDS_PER_PAGE];

/// Identity of a page: worker and page number. It is unique in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageId(pub u64);

impl PageId {
    /// Page `page` (below 2⁴⁰) of the share of worker `worker`.
    pub fn new(worker: usize, page: u64) -> Self {
        Self((worker as u64) << WORKER_SHIFT | page)
    }
    /// Index of the worker that owns the page.
    pub fn worker(self) -> u64 {
        self.0 >> WORKER_SHIFT
    }
    /// The page's number in the share.
    pub fn page(self) -> u64 {
        self.0 & ((1 << WORKER_SHIFT) - 1)
    }
}

/// The set of words in a page that a step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WordPlan(u16);

impl WordPlan {
    /// Every word of the page.
    pub const FULL: Self = Self(WORDS_PER_PAGE as u16);
    /// Eight words, 584 bytes apart, as tide writes them.
    pub const TIDE: Self = Self(8);

    /// `count` words at equal distances, including the first and the last word of the page.
    ///
    /// `None` unless 2 ≤ `count` ≤ 512.
    pub fn new(count: usize) -> Option<Self> {
        (2..=WORDS_PER_PAGE).contains(&count).then_some(Self(count as u16))
    }
    /// Number of words that a step writes.
    pub fn count(self) -> usize {
        usize::from(self.0)
    }
    /// The position in the page (0..512) of the `nth` written word; ascending in `nth`.
    pub fn slot(self, nth: usize) -> usize {
        nth * (WORDS_PER_PAGE - 1) / (self.count() - 1)
    }
    /// Every written position, in the order of writing.
    pub fn slots(self) -> impl Iterator<Item = usize> {
        (0..self.count()).map(move |nth| self.slot(nth))
    }
}

/// An involution: `fold(fold(x)) == x`, so no information is lost.
#[inline]
pub const fn fold(x: u64) -> u64 {
    x ^ (x >> 32)
}

/// The word that `step` writes at `slot` of page `id`. Slot 0 has the step number.
#[inline]
pub fn word(step: u64, id: PageId, slot: usize) -> u64 {
    if slot == 0 { step } else { fold(base(step, id).wrapping_add((slot as u64).wrapping_mul(SLOT_FACTOR))) }
}

/// Overwrites `page` with the first `count` words of `plan` that `step` writes.
#[inline]
pub fn overlay(page: &mut PageWords, step: u64, id: PageId, plan: WordPlan, count: usize) {
    let base = base(step, id);
    if plan == WordPlan::FULL {
        let mut sum = base;
        for word in &mut page[..count] {
            *word = fold(sum);
            sum = sum.wrapping_add(SLOT_FACTOR);
        }
    } else {
        for slot in plan.slots().take(count) {
            page[slot] = fold(base.wrapping_add((slot as u64).wrapping_mul(SLOT_FACTOR)));
        }
    }
    if count > 0 {
        page[0] = step;
    }
}

/// The step that would have written `found` at `slot` of page `id`.
///
/// Every word has such a step. The result is meaningful only if the worker can have taken it.
pub fn step_of(found: u64, id: PageId, slot: usize) -> u64 {
    if slot == 0 {
        return found;
    }
    let rest = fold(found).wrapping_sub(base(0, id)).wrapping_sub((slot as u64).wrapping_mul(SLOT_FACTOR));
    rest.wrapping_mul(inverse(STEP_FACTOR))
}

/// The page for which `step` would have written `found` at `slot` (not 0).
pub fn page_of(found: u64, step: u64, slot: usize) -> PageId {
    let rest = fold(found)
        .wrapping_sub(step.wrapping_mul(STEP_FACTOR))
        .wrapping_sub((slot as u64).wrapping_mul(SLOT_FACTOR));
    PageId(rest.wrapping_mul(inverse(PAGE_FACTOR)))
}

/// The inverse of an odd number modulo 2⁶⁴, by Newton's method.
///
/// 3 bits are correct at first, and each round doubles the number.
pub(super) const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut round = 0;
    while round < 5 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        round += 1;
    }
    x
}

#[inline]
fn base(step: u64, id: PageId) -> u64 {
    step.wrapping_mul(STEP_FACTOR).wrapping_add(id.0.wrapping_mul(PAGE_FACTOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_inverted_gives_step_and_page() {
        for (step, worker, page, slot) in
            [(1, 0, 0, 1), (77, 3, 12_345, 511), (1 << 40, 255, (1 << 40) - 1, 73)]
        {
            let id = PageId::new(worker, page);
            let found = word(step, id, slot);
            assert_eq!(step_of(found, id, slot), step);
            assert_eq!(page_of(found, step, slot), id);
        }
    }

    #[test]
    fn plan_of_any_size_holds_first_and_last_word_in_order() {
        for count in 2..=WORDS_PER_PAGE {
            let slots: Vec<_> = WordPlan::new(count).unwrap().slots().collect();
            assert_eq!((slots[0], slots[count - 1]), (0, WORDS_PER_PAGE - 1));
            assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "{count}");
        }
        assert_eq!(WordPlan::new(1), None);
        assert_eq!(WordPlan::new(513), None);
        assert_eq!(WordPlan::TIDE.slot(1), 73);
    }

    #[test]
    fn overlay_writes_what_word_says_and_no_more() {
        for plan in [WordPlan::FULL, WordPlan::TIDE, WordPlan::new(100).unwrap()] {
            let id = PageId::new(2, 9);
            for count in [0, 1, 2, plan.count() - 1, plan.count()] {
                let mut page = [0xdead; WORDS_PER_PAGE];
                overlay(&mut page, 5, id, plan, count);
                let written: Vec<_> = plan.slots().take(count).collect();
                for (slot, &found) in page.iter().enumerate() {
                    let expected = if written.contains(&slot) { word(5, id, slot) } else { 0xdead };
                    assert_eq!(found, expected);
                }
            }
        }
    }
}
