//! A bitmap of pages in atomic words: dirty sources set bits while lanes take them.
//!
//! Every change through a shared reference is one read-modify-write of a word with acquire and release order. A
//! thread that takes a bit therefore sees all writes that preceded the setting of that bit. Only
//! [`PageBitmap::set_all`] and [`PageBitmap::clear_all`] use plain stores, so no other thread may change the
//! bitmap meanwhile. An exclusive reference (`exclusive`) permits plain vector instructions.

mod exclusive;

use std::fmt;

use crate::atomic::{AtomicU64, Ordering, zeroed};
use crate::merge::Method;

/// A range of neighbouring pages of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Index of the first page.
    pub first: u64,
    /// Number of pages; at least 1.
    pub count: u64,
}

impl Run {
    /// Returns the index after the last page.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

/// A set of pages of one block, one bit for each page.
///
/// Bits after the last page are never set. Methods that take a page number panic if the bitmap does not contain
/// it. A peer's page numbers must therefore be checked against the block first.
pub struct PageBitmap {
    words: Box<[AtomicU64]>,
    pages: u64,
}

impl PageBitmap {
    /// Makes a bitmap of `pages` clear bits.
    pub fn new(pages: u64) -> Self {
        PageBitmap { words: zeroed(pages.div_ceil(64) as usize), pages }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the words: page `p` is bit `p % 64` of word `p / 64`.
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Whether the bit of `page` is set. Panics if the bitmap does not contain the page.
    pub fn get(&self, page: u64) -> bool {
        let (word, bit) = self.locate(page);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Sets the page's bit and returns whether it was set before.
    pub fn set(&self, page: u64) -> bool {
        let (word, bit) = self.locate(page);
        word.fetch_or(bit, Ordering::AcqRel) & bit != 0
    }

    /// Clears the page's bit and returns whether it was set before.
    pub fn clear(&self, page: u64) -> bool {
        let (word, bit) = self.locate(page);
        word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Sets the bits of all pages. A bit that another thread clears meanwhile may be set again.
    pub fn set_all(&self) {
        for (index, word) in self.words.iter().enumerate() {
            word.store(self.valid(index), Ordering::Release);
        }
    }

    /// Clears the bits of all pages.
    ///
    /// A bit that another thread sets meanwhile may be lost. A thread that clears a bit meanwhile may still see
    /// it as set.
    pub fn clear_all(&self) {
        for word in &self.words {
            word.store(0, Ordering::Release);
        }
    }

    /// Returns the number of set bits.
    pub fn count(&self) -> u64 {
        staged(&self.words, |_, bits| Method::best().count(bits))
    }

    /// Returns the number of set bits in `[first, first + count)`.
    pub fn count_range(&self, first: u64, count: u64) -> u64 {
        self.masks(first, count)
            .map(|(index, mask)| u64::from((self.words[index].load(Ordering::Acquire) & mask).count_ones()))
            .sum()
    }

    /// Sets the bits of `[first, first + count)` and returns how many were clear.
    pub fn set_range(&self, first: u64, count: u64) -> u64 {
        self.masks(first, count)
            .map(|(index, mask)| {
                let old = self.words[index].fetch_or(mask, Ordering::AcqRel);
                u64::from((mask & !old).count_ones())
            })
            .sum()
    }

    /// Clears the bits of `[first, first + count)` and returns how many were set.
    pub fn clear_range(&self, first: u64, count: u64) -> u64 {
        self.masks(first, count)
            .map(|(index, mask)| {
                let old = self.words[index].fetch_and(!mask, Ordering::AcqRel);
                u64::from((mask & old).count_ones())
            })
            .sum()
    }

    /// Copies the bits from page `first` on into `out`, whose bit 0 is page `first`.
    ///
    /// `first` needs no alignment. Bits after the last page read as clear.
    pub fn copy_words(&self, first: u64, out: &mut [u64]) {
        let base = (first / 64) as usize;
        let shift = (first % 64) as u32;
        let load = |index: usize| self.words.get(base + index).map_or(0, |word| word.load(Ordering::Acquire));
        for (index, out) in out.iter_mut().enumerate() {
            *out = load(index) >> shift;
            if shift > 0 {
                *out |= load(index + 1) << (64 - shift);
            }
        }
    }

    /// Finds the first run of set bits in `[from, end)`, at most `max` pages. It clears no bit.
    pub fn next_run(&self, from: u64, end: u64, max: u64) -> Option<Run> {
        let end = end.min(self.pages);
        let first = self.next_set(from, end)?;
        let end = end.min(first.saturating_add(max));
        let mut at = first;
        while at < end {
            let (index, bit) = ((at / 64) as usize, (at % 64) as u32);
            let ones = (self.words[index].load(Ordering::Acquire) >> bit).trailing_ones();
            at += u64::from(ones);
            if bit + ones < 64 {
                break;
            }
        }
        let count = at.min(end).saturating_sub(first);
        (count > 0).then_some(Run { first, count })
    }

    /// Takes (clears) the first run of set bits in `[from, end)`, at most `max` pages.
    ///
    /// Only this call cleared the bits of the returned run. `None` if no bit was set.
    pub fn take_run(&self, from: u64, end: u64, max: u64) -> Option<Run> {
        let end = end.min(self.pages);
        let mut from = from;
        loop {
            let first = self.next_set(from, end)?;
            let limit = end.min(first.saturating_add(max));
            let mut at = first;
            while at < limit {
                let taken = self.take_in_word(at, limit);
                at += taken;
                if taken == 0 || !at.is_multiple_of(64) {
                    break;
                }
            }
            if at > first {
                return Some(Run { first, count: at - first });
            }
            if max == 0 {
                return None;
            }
            // Another thread cleared the bit between the search and the compare-exchange.
            from = first;
        }
    }

    /// Takes the run that begins exactly at `page`, within its word and below `limit`. Returns its length.
    fn take_in_word(&self, page: u64, limit: u64) -> u64 {
        let word = &self.words[(page / 64) as usize];
        let bit = (page % 64) as u32;
        let most = (limit - page).min(u64::from(64 - bit)) as u32;
        let mut old = word.load(Ordering::Acquire);
        loop {
            let count = (old >> bit).trailing_ones().min(most);
            if count == 0 {
                return 0;
            }
            let mask = (u64::MAX >> (64 - count)) << bit;
            match word.compare_exchange(old, old & !mask, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return u64::from(count),
                Err(now) => old = now,
            }
        }
    }

    /// Returns the first page in `[from, end)` whose bit is set.
    ///
    /// `end` must not exceed the number of pages.
    fn next_set(&self, from: u64, end: u64) -> Option<u64> {
        if from >= end {
            return None;
        }
        let mut index = (from / 64) as usize;
        let last = ((end - 1) / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        while index <= last {
            let bits = self.words[index].load(Ordering::Acquire) & mask;
            if bits != 0 {
                let page = index as u64 * 64 + u64::from(bits.trailing_zeros());
                return (page < end).then_some(page);
            }
            mask = u64::MAX;
            index += 1;
        }
        None
    }

    /// Returns the words that `[first, first + count)` covers, each with a mask of the covered bits.
    fn masks(&self, first: u64, count: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let end = first.checked_add(count).filter(|end| *end <= self.pages);
        let end = end
            .unwrap_or_else(|| panic!("pages {first}..+{count} are not in a bitmap of {} pages", self.pages));
        let range = if count == 0 { 0..0 } else { first / 64..end.div_ceil(64) };
        range.map(move |index| {
            let from = first.saturating_sub(index * 64);
            let to = (end - index * 64).min(64);
            (index as usize, (u64::MAX >> (64 - (to - from))) << from)
        })
    }

    /// Returns a mask of the bits of a word that belong to pages.
    fn valid(&self, index: usize) -> u64 {
        match self.pages - index as u64 * 64 {
            rest @ 1..64 => u64::MAX >> (64 - rest),
            _ => u64::MAX,
        }
    }

    fn locate(&self, page: u64) -> (&AtomicU64, u64) {
        assert!(page < self.pages, "page {page} is not in a bitmap of {} pages", self.pages);
        (&self.words[(page / 64) as usize], 1 << (page % 64))
    }
}

impl fmt::Debug for PageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBitmap({} of {} set)", self.count(), self.pages)
    }
}

/// Passes copies of words that other threads may change to `each`, piece by piece.
///
/// `each` gets the index of the first word of a piece, and the piece. The function returns the sum of the
/// results. Vector instructions may read the copies, because they are plain words.
fn staged(words: &[AtomicU64], mut each: impl FnMut(usize, &[u64]) -> u64) -> u64 {
    let mut buffer = [0; 512];
    let mut sum = 0;
    for (index, words) in words.chunks(buffer.len()).enumerate() {
        for (to, word) in buffer.iter_mut().zip(words) {
            *to = word.load(Ordering::Acquire);
        }
        sum += each(index * buffer.len(), &buffer[..words.len()]);
    }
    sum
}
