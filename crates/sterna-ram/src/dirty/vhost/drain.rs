//! Taking bits out of a log that others fill.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::merge::Method;

/// A word of a log that others change at the same time. Bit 0 is the lowest bit of the word's first byte.
pub trait LogWord {
    /// What it holds right now. Bits in it stay until they are taken.
    fn look(&self) -> u64;

    /// Takes all its bits: each was set before this, and none that is set after this is lost. Who takes a
    /// bit sees what was written before it was set.
    fn take(&self) -> u64;

    /// Takes those of its bits that are in `mask`.
    fn take_part(&self, mask: u64) -> u64;
}

/// Writes what `impl LogWord` says for an atomic type.
macro_rules! log_word {
    ($word:ty, $ordering:ty) => {
        impl LogWord for $word {
            #[inline]
            fn look(&self) -> u64 {
                u64::from_le(self.load(<$ordering>::Relaxed))
            }

            #[inline]
            fn take(&self) -> u64 {
                u64::from_le(self.swap(0, <$ordering>::AcqRel))
            }

            #[inline]
            fn take_part(&self, mask: u64) -> u64 {
                u64::from_le(self.fetch_and(!mask.to_le(), <$ordering>::AcqRel)) & mask
            }
        }
    };
}

log_word!(AtomicU64, Ordering);
#[cfg(loom)]
log_word!(loom::sync::atomic::AtomicU64, loom::sync::atomic::Ordering);

/// Takes all bits of `log` into `out`, word by word. Words that are zero are only looked at: an atomic
/// instruction on each would cost ten times as much as all the rest.
pub fn drain_words<W: LogWord>(log: &[W], out: &mut [u64]) {
    for (word, out) in log.iter().zip(out) {
        *out = if word.look() == 0 { 0 } else { word.take() };
    }
}

/// As [`drain_words`], looking at many words at once.
pub(super) fn drain(log: &[AtomicU64], out: &mut [u64]) {
    assert_eq!(log.len(), out.len());
    let head = log.as_ptr().align_offset(64).min(log.len());
    let (log_head, log) = log.split_at(head);
    let (out_head, out) = out.split_at_mut(head);
    drain_words(log_head, out_head);
    let body = log.len() / 8 * 8;
    let (log, log_tail) = log.split_at(body);
    let (out, out_tail) = out.split_at_mut(body);
    match Method::best() {
        // SAFETY: the machine has the instructions; `log` begins at a line of 64 bytes; both have the same
        // number of words, a multiple of 8.
        #[cfg(target_arch = "x86_64")]
        Method::Avx512 => unsafe { x86::avx512(log, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Method::Avx2 => unsafe { x86::avx2(log, out) },
        _ => drain_words(log, out),
    }
    drain_words(log_tail, out_tail);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_or_si256, _mm256_testz_si256, _mm512_setzero_si512, _mm512_storeu_si512,
        _mm512_test_epi64_mask,
    };
    use std::ptr;

    use super::{AtomicU64, LogWord, drain_words};

    /// # Safety
    /// The machine has AVX-512 F; `log` is aligned to 64 bytes; `log` and `out` have the same length, a
    /// multiple of 8.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(log: &[AtomicU64], out: &mut [u64]) {
        for (log, out) in log.chunks_exact(8).zip(out.chunks_exact_mut(8)) {
            // SAFETY: eight words, aligned. Others change them meanwhile: the load is volatile, so it is
            // made once and nothing is assumed of what it gives; each word's eight bytes come in one piece.
            let seen = unsafe { ptr::read_volatile(log.as_ptr().cast::<__m512i>()) };
            let mut some = _mm512_test_epi64_mask(seen, seen);
            // SAFETY: eight words of ours.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast::<__m512i>(), _mm512_setzero_si512()) };
            while some != 0 {
                let index = some.trailing_zeros() as usize;
                out[index] = log[index].take();
                some &= some - 1;
            }
        }
    }

    /// # Safety
    /// The machine has AVX2; `log` is aligned to 32 bytes; `log` and `out` have the same length, a multiple
    /// of 8.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(log: &[AtomicU64], out: &mut [u64]) {
        for (log, out) in log.chunks_exact(8).zip(out.chunks_exact_mut(8)) {
            let vectors = log.as_ptr().cast::<__m256i>();
            // SAFETY: two vectors of four words each, aligned; volatile as in `avx512`.
            let seen =
                unsafe { _mm256_or_si256(ptr::read_volatile(vectors), ptr::read_volatile(vectors.add(1))) };
            if _mm256_testz_si256(seen, seen) != 0 {
                out.fill(0);
            } else {
                drain_words(log, out);
            }
        }
    }
}
