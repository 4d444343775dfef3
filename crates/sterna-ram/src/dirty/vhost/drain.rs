//! Takes bits out of a log that other threads, processes or devices fill meanwhile.

use crate::atomic::{AtomicU64, Ordering};
use crate::merge::Method;

/// A word of a log that others change meanwhile. Bit 0 is the lowest bit of the word's first byte.
pub(crate) trait LogWord {
    /// Returns the present bits without clearing them.
    fn peek(&self) -> u64;

    /// Clears the word and returns its bits.
    ///
    /// A bit that is set afterwards is not lost. The caller sees all writes that preceded the setting of a
    /// returned bit.
    fn take(&self) -> u64;

    /// Clears the bits in `mask` and returns those that were set.
    fn take_part(&self, mask: u64) -> u64;
}

impl LogWord for AtomicU64 {
    #[inline]
    fn peek(&self) -> u64 {
        u64::from_le(self.load(Ordering::Relaxed))
    }

    #[inline]
    fn take(&self) -> u64 {
        u64::from_le(self.swap(0, Ordering::AcqRel))
    }

    #[inline]
    fn take_part(&self, mask: u64) -> u64 {
        u64::from_le(self.fetch_and(!mask.to_le(), Ordering::AcqRel)) & mask
    }
}

/// The index and the bits of a word that was not zero.
pub(crate) type Found = (usize, u64);

/// Takes all bits of `log`, and appends the words that had any to `found`.
///
/// The first word of `log` has the index `first`. Words that are zero are only read, because an atomic
/// instruction on each would cost ten times as much as the rest.
#[inline]
pub(crate) fn drain_words<W: LogWord>(log: &[W], first: usize, found: &mut Vec<Found>) {
    for (place, word) in (first..).zip(log) {
        if word.peek() != 0 {
            found.push((place, word.take()));
        }
    }
}

/// Does the same as [`drain_words`], reading many words per instruction.
pub(super) fn drain(log: &[AtomicU64], first: usize, found: &mut Vec<Found>) {
    let head = log.as_ptr().align_offset(64).min(log.len());
    let body = (log.len() - head) / 8 * 8;
    let (start, rest) = log.split_at(head);
    let (middle, end) = rest.split_at(body);
    drain_words(start, first, found);
    let first = first + head;
    match Method::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` has found AVX-512 F here; `middle` begins at a line of 64 bytes and has a multiple of 8
        // words.
        Method::Avx512 => unsafe { x86::avx512(middle, first, found) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` has found AVX2 here; an alignment to 64 bytes includes one to 32.
        Method::Avx2 => unsafe { x86::avx2(middle, first, found) },
        _ => drain_words(middle, first, found),
    }
    drain_words(end, first + body, found);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, __m512i, _mm256_or_si256, _mm256_testz_si256, _mm512_test_epi64_mask};
    use std::ptr;

    use super::{Found, LogWord, drain_words};
    use crate::atomic::AtomicU64;

    /// # Safety
    /// The machine has AVX-512 F; `log` is aligned to 64 bytes and has a multiple of 8 words.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(log: &[AtomicU64], first: usize, found: &mut Vec<Found>) {
        for (place, log) in (first..).step_by(8).zip(log.chunks_exact(8)) {
            // SAFETY: eight words, aligned. Others change them meanwhile. The volatile load is made once, and
            // the compiler assumes nothing about its value. Each word's eight bytes are read in one piece.
            let seen = unsafe { ptr::read_volatile(log.as_ptr().cast::<__m512i>()) };
            let mut some = _mm512_test_epi64_mask(seen, seen);
            while some != 0 {
                let index = some.trailing_zeros() as usize;
                found.push((place + index, log[index].take()));
                some &= some - 1;
            }
        }
    }

    /// # Safety
    /// The machine has AVX2; `log` is aligned to 32 bytes and has a multiple of 8 words.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(log: &[AtomicU64], first: usize, found: &mut Vec<Found>) {
        for (place, log) in (first..).step_by(8).zip(log.chunks_exact(8)) {
            let vectors = log.as_ptr().cast::<__m256i>();
            // SAFETY: two vectors of four words each, aligned; volatile as in `avx512`.
            let [a, b] = unsafe { [ptr::read_volatile(vectors), ptr::read_volatile(vectors.add(1))] };
            let seen = _mm256_or_si256(a, b);
            if _mm256_testz_si256(seen, seen) == 0 {
                drain_words(log, place, found);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_by_every_method_finds_what_is_there_and_clears_it() {
        #[repr(align(64))]
        struct Aligned([AtomicU64; 64]);
        let value = |index: u64| match index % 7 {
            0 | 3 => index.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            _ => 0,
        };
        let expected: Vec<Found> = (0..64)
            .filter(|index| value(*index) != 0)
            .map(|index| (100 + index as usize, value(index)))
            .collect();
        for method in Method::available() {
            let log = Aligned(std::array::from_fn(|index| AtomicU64::new(value(index as u64))));
            let mut found = Vec::new();
            match method {
                // SAFETY: the machine has the instructions, and the log is aligned and has a multiple of eight words.
                Method::Avx512 => unsafe { x86::avx512(&log.0, 100, &mut found) },
                // SAFETY: `available` lists the methods of this machine; an alignment to 64 bytes includes one
                // to 32.
                Method::Avx2 => unsafe { x86::avx2(&log.0, 100, &mut found) },
                Method::Scalar => drain_words(&log.0, 100, &mut found),
            }
            assert_eq!(found, expected, "{method:?}");
            assert!(log.0.iter().all(|word| word.peek() == 0), "{method:?}");
        }
    }
}
