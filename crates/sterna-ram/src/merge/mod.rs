//! Merging bitmaps at the speed of memory.
//!
//! Words of one bitmap are ORed into another, moved up by any number of bits, and the bits that are new
//! there are counted in the same pass. The source is looked at four vectors at a time; where it is clear, as
//! most of a dirty log is, the target's memory is not touched. Above a size that pays for starting them,
//! threads share the work.

mod share;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

pub(crate) use share::share;

/// Words that the vector loops do in one turn.
const GROUP: usize = 32;
/// Words in a cache line, to which the vector loops align the target.
const LINE: usize = 8;
/// A thread must have as many words to work on, or starting it costs more than it saves: 8 MiB, the bits of
/// 256 GiB, which one thread merges in some 1.2 ms. The start itself is 30 µs, but lanes keep the cores busy
/// while bits are gathered, and then a helper waits for its turn, up to 4 ms: with 1 MiB a thread, two were
/// no faster than one on a loaded machine of two cores.
const WORDS_PER_THREAD: usize = 1 << 20;
/// More threads than this find no more memory bandwidth.
const MOST_THREADS: usize = 8;

/// Words to be merged, moved up by some bits: bit `n` of the words stands at bit `n + bits`.
#[derive(Debug, Clone, Copy)]
pub struct Shifted<'a> {
    words: &'a [u64],
    bits: u32,
    /// Words at the beginning, as moved, that are left out.
    skipped: usize,
}

impl<'a> Shifted<'a> {
    /// `words` moved up by `bits`.
    ///
    /// # Panics
    /// If `bits` is more than 63.
    pub fn new(words: &'a [u64], bits: u32) -> Self {
        assert!(bits < 64, "whole words are left out in the target, not moved over");
        Shifted { words, bits, skipped: 0 }
    }

    /// The same without the first `words` words (as moved).
    pub fn after(self, words: usize) -> Self {
        Shifted { skipped: self.skipped + words, ..self }
    }

    /// Word `index` as moved; 0 where there is none.
    pub fn word(&self, index: usize) -> u64 {
        let at = self.skipped + index;
        let word = |at: usize| self.words.get(at).copied().unwrap_or(0);
        let below = if self.bits > 0 && at > 0 { word(at - 1) >> (64 - self.bits) } else { 0 };
        word(at) << self.bits | below
    }

    /// From which word on (as moved) there is none.
    fn end(&self) -> usize {
        (self.words.len() + usize::from(self.bits > 0)).saturating_sub(self.skipped)
    }
}

/// ORs `from` into `into`, on several threads if that pays; gives how many bits were clear before. What
/// lies after the end of `into` is left out.
pub fn merge(into: &mut [u64], from: Shifted<'_>) -> u64 {
    let end = into.len().min(from.end());
    let into = &mut into[..end];
    let threads = threads_for(end);
    if threads <= 1 {
        return Method::best().merge(into, from);
    }
    let part = end.div_ceil(threads).next_multiple_of(LINE);
    let parts = into.chunks_mut(part).enumerate();
    let merged = share(threads, parts, |(index, into)| Method::best().merge(into, from.after(index * part)));
    merged.into_iter().sum()
}

/// ORs one word in; gives how many bits were clear before.
#[inline]
pub(crate) fn add(into: &mut u64, bits: u64) -> u64 {
    if bits == 0 {
        return 0;
    }
    let newly = bits & !*into;
    *into |= bits;
    u64::from(newly.count_ones())
}

/// Clears in `from` what is set in `bits`. Plain enough for the compiler to make vectors of it, of whichever
/// instructions the caller has.
#[inline(always)]
fn clear(from: &mut [u64], bits: &[u64]) -> u64 {
    let mut cleared = 0;
    for (word, bits) in from.iter_mut().zip(bits) {
        cleared += u64::from((*word & bits).count_ones());
        *word &= !bits;
    }
    cleared
}

/// How many bits are set; as plain as `clear`.
#[inline(always)]
fn count(bits: &[u64]) -> u64 {
    bits.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// On how many threads so many words should be worked.
pub(crate) fn threads_for(words: usize) -> usize {
    // Asking costs files to be read.
    static CORES: OnceLock<usize> = OnceLock::new();
    let wanted = words / WORDS_PER_THREAD;
    if wanted <= 1 {
        return 1;
    }
    let cores = *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get));
    wanted.min(cores).min(MOST_THREADS)
}

/// By which instructions to merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Words of eight bytes; works everywhere.
    Scalar,
    /// 32 bytes at once.
    Avx2,
    /// 64 bytes at once.
    Avx512,
}

impl Method {
    /// The methods that this machine can do, the best last.
    pub fn available() -> &'static [Method] {
        static FOUND: OnceLock<Vec<Method>> = OnceLock::new();
        FOUND.get_or_init(|| {
            let mut found = vec![Method::Scalar];
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx2") {
                    found.push(Method::Avx2);
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vpopcntdq") {
                    found.push(Method::Avx512);
                }
            }
            found
        })
    }

    /// The best of them.
    pub fn best() -> Method {
        static BEST: OnceLock<Method> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().copied().unwrap_or(Method::Scalar))
    }

    /// As [`merge`], on this thread alone.
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn merge(self, into: &mut [u64], from: Shifted<'_>) -> u64 {
        assert!(self == Method::best() || Self::available().contains(&self));
        let end = into.len().min(from.end());
        let into = &mut into[..end];
        let (head, body) = self.divide(into, &from);
        let mut newly = 0;
        for (index, word) in into[..head].iter_mut().enumerate() {
            newly += add(word, from.word(index));
        }
        if body > 0 {
            // In `from.words`: from where on the body's words are.
            let at = from.skipped + head;
            let high = &from.words[at..at + body];
            let low = if from.bits == 0 { high } else { &from.words[at - 1..at - 1 + body] };
            newly += self.body(&mut into[head..head + body], high, low, from.bits);
        }
        for (index, word) in into.iter_mut().enumerate().skip(head + body) {
            newly += add(word, from.word(index));
        }
        newly
    }

    /// Clears in `from` what is set in `bits`; gives how many bits were set there.
    ///
    /// # Panics
    /// If the lengths differ, or this machine cannot do the method.
    pub fn clear(self, from: &mut [u64], bits: &[u64]) -> u64 {
        assert!(self == Method::best() || Self::available().contains(&self));
        assert_eq!(from.len(), bits.len());
        match self {
            // SAFETY: `available` has found AVX2 here (asserted above).
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => unsafe { x86::clear_avx2(from, bits) },
            // SAFETY: `available` has found AVX-512 F and VPOPCNTDQ here (asserted above).
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => unsafe { x86::clear_avx512(from, bits) },
            _ => clear(from, bits),
        }
    }

    /// How many bits are set.
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn count(self, bits: &[u64]) -> u64 {
        assert!(self == Method::best() || Self::available().contains(&self));
        match self {
            // SAFETY: `available` has found AVX2 here (asserted above).
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => unsafe { x86::count_avx2(bits) },
            // SAFETY: `available` has found AVX-512 F and VPOPCNTDQ here (asserted above).
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => unsafe { x86::count_avx512(bits) },
            _ => count(bits),
        }
    }

    /// How many words at the beginning go one by one, and how many after them by groups: such that in the
    /// groups the target is aligned and each word has both of its parts in the source.
    fn divide(self, into: &[u64], from: &Shifted<'_>) -> (usize, usize) {
        let mut head = into.as_ptr().align_offset(LINE * size_of::<u64>());
        if head == 0 && from.bits > 0 && from.skipped == 0 {
            head = LINE;
        }
        let end = from.words.len().saturating_sub(from.skipped).min(into.len());
        if self == Method::Scalar || head >= end {
            return (into.len(), 0);
        }
        (head, (end - head) / GROUP * GROUP)
    }

    /// `into[n] |= high[n] << bits | low[n] >> (64 - bits)`. All slices have the same length, a multiple of
    /// GROUP; `into` is aligned to a line.
    fn body(self, into: &mut [u64], high: &[u64], low: &[u64], bits: u32) -> u64 {
        assert!(into.len() == high.len() && into.len() == low.len() && into.len().is_multiple_of(GROUP));
        match self {
            // SAFETY: the machine has the instructions (asserted in `merge`); the slices' lengths were
            // asserted just now, and `divide` aligns `into` to a line.
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => unsafe { x86::avx2(into, high, low, bits) },
            // SAFETY: as for AVX2: the instructions were asserted in `merge`, the lengths just now, and `divide` aligns
            // `into` to a line.
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => unsafe { x86::avx512(into, high, low, bits) },
            _ => {
                let words = into.iter_mut().zip(high.iter().zip(low));
                words.map(|(into, (high, low))| add(into, high << bits | (low >> 1) >> (63 - bits))).sum()
            }
        }
    }
}
