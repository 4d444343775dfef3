//! Merges bitmaps at the speed of memory.
//!
//! Words of one bitmap are shifted by any number of bits and ORed into another bitmap. The same pass counts the
//! bits that are new there. The source is read four vectors at a time. Where it is clear, like most of a dirty
//! log, the target's memory is not touched. Large bitmaps are merged by several threads.

mod share;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

pub(crate) use share::share;

/// Words per iteration of the vector loops.
const GROUP: usize = 32;
/// Words in a cache line; the vector loops align the target to it.
const LINE: usize = 8;
/// Minimum of words per thread: 8 MiB, the bits of 256 GiB of guest RAM.
///
/// One thread merges this many words in about 1.2 ms. With fewer words, starting a thread costs more than it
/// saves. The start itself takes 30 µs. But lanes keep the cores busy during a sync, and then a helper waits up
/// to 4 ms for a core. With 1 MiB per thread, two threads were no faster than one on a loaded machine with two
/// cores.
const WORDS_PER_THREAD: usize = 1 << 20;
/// Limit of threads: more threads get no more memory bandwidth.
const MOST_THREADS: usize = 8;

/// Words to merge, shifted up: bit `n` of the words becomes bit `n + bits`.
#[derive(Debug, Clone, Copy)]
pub struct Shifted<'a> {
    words: &'a [u64],
    bits: u32,
    /// Number of leading shifted words that are left out.
    skipped: usize,
}

impl<'a> Shifted<'a> {
    /// Returns `words` shifted up by `bits`.
    ///
    /// # Panics
    /// If `bits` is more than 63.
    pub fn new(words: &'a [u64], bits: u32) -> Self {
        assert!(bits < 64, "whole words are left out in the target, not moved over");
        Shifted { words, bits, skipped: 0 }
    }

    /// Returns the same words without the first `words` shifted words.
    pub fn after(self, words: usize) -> Self {
        Shifted { skipped: self.skipped + words, ..self }
    }

    /// Returns the shifted word at `index`; 0 after the end.
    pub fn word(&self, index: usize) -> u64 {
        let at = self.skipped + index;
        let word = |at: usize| self.words.get(at).copied().unwrap_or(0);
        let below = if self.bits > 0 && at > 0 { word(at - 1) >> (64 - self.bits) } else { 0 };
        word(at) << self.bits | below
    }

    /// Returns the number of shifted words.
    fn end(&self) -> usize {
        (self.words.len() + usize::from(self.bits > 0)).saturating_sub(self.skipped)
    }
}

/// Sets the bits of `from` in `into`, and returns how many were clear before.
///
/// Several threads share the work if that is faster. Words after the end of `into` are ignored.
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

/// Sets the bits of one word and returns how many were clear before.
#[inline]
pub(crate) fn add(into: &mut u64, bits: u64) -> u64 {
    if bits == 0 {
        return 0;
    }
    let newly = bits & !*into;
    *into |= bits;
    u64::from(newly.count_ones())
}

/// Clears in `from` every bit that is set in `bits`, and returns how many were set.
///
/// The loop is simple enough for the compiler to vectorize it with the caller's instructions.
#[inline(always)]
fn clear(from: &mut [u64], bits: &[u64]) -> u64 {
    let mut cleared = 0;
    for (word, bits) in from.iter_mut().zip(bits) {
        cleared += u64::from((*word & bits).count_ones());
        *word &= !bits;
    }
    cleared
}

/// Returns the number of set bits; the compiler vectorizes it like `clear`.
#[inline(always)]
fn count(bits: &[u64]) -> u64 {
    bits.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Returns the number of threads for a merge of this many words.
pub(crate) fn threads_for(words: usize) -> usize {
    let wanted = words / WORDS_PER_THREAD;
    if wanted <= 1 {
        return 1;
    }
    wanted.min(crate::sys::processors()).min(MOST_THREADS)
}

/// The instructions for a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// 8 bytes per step; works on every machine.
    Scalar,
    /// 32 bytes per step.
    Avx2,
    /// 64 bytes per step.
    Avx512,
}

impl Method {
    /// Returns the methods that this machine supports, the best last.
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

    /// Returns the best method that this machine supports.
    pub fn best() -> Method {
        static BEST: OnceLock<Method> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().copied().unwrap_or(Method::Scalar))
    }

    /// Merges like [`merge`], on this thread only.
    ///
    /// # Panics
    /// If this machine does not support the method.
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
            // Index in `from.words` of the body's first word.
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

    /// Clears in `from` every bit that is set in `bits`, and returns how many were set.
    ///
    /// # Panics
    /// If the lengths differ, or if this machine does not support the method.
    pub fn clear(self, from: &mut [u64], bits: &[u64]) -> u64 {
        assert!(self == Method::best() || Self::available().contains(&self));
        assert_eq!(from.len(), bits.len());
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX2 here (asserted above).
            Method::Avx2 => unsafe { x86::clear_avx2(from, bits) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX-512 F and VPOPCNTDQ here (asserted above).
            Method::Avx512 => unsafe { x86::clear_avx512(from, bits) },
            _ => clear(from, bits),
        }
    }

    /// Returns the number of set bits.
    ///
    /// # Panics
    /// If this machine does not support the method.
    pub fn count(self, bits: &[u64]) -> u64 {
        assert!(self == Method::best() || Self::available().contains(&self));
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX2 here (asserted above).
            Method::Avx2 => unsafe { x86::count_avx2(bits) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX-512 F and VPOPCNTDQ here (asserted above).
            Method::Avx512 => unsafe { x86::count_avx512(bits) },
            _ => count(bits),
        }
    }

    /// Returns how many words are merged one by one, and how many then in groups.
    ///
    /// In the groups, the target is aligned, and both parts of each shifted word are in the source.
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
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has the instructions (asserted in `merge`); the slices' lengths were
            // asserted just now, and `divide` aligns `into` to a line.
            Method::Avx2 => unsafe { x86::avx2(into, high, low, bits) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX2: the instructions were asserted in `merge`, the lengths just now, and `divide` aligns
            // `into` to a line.
            Method::Avx512 => unsafe { x86::avx512(into, high, low, bits) },
            _ => {
                let words = into.iter_mut().zip(high.iter().zip(low));
                words.map(|(into, (high, low))| add(into, high << bits | (low >> 1) >> (63 - bits))).sum()
            }
        }
    }
}
