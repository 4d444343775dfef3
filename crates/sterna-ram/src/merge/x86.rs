//! The vector loops of a merge.
//!
//! Each iteration reads four vectors of the source, and skips the target if they are clear. The shift counts
//! are the same for all words. A shift by 64 produces zeros, so unshifted words need no separate loop: `low`
//! contributes nothing.

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_cvtsi64_si128, _mm256_add_epi8, _mm256_add_epi64, _mm256_and_si256,
    _mm256_andnot_si256, _mm256_load_si256, _mm256_loadu_si256, _mm256_or_si256, _mm256_sad_epu8,
    _mm256_set1_epi8, _mm256_setr_epi8, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_sll_epi64,
    _mm256_srl_epi64, _mm256_srli_epi16, _mm256_store_si256, _mm256_storeu_si256, _mm256_testz_si256,
    _mm512_add_epi64, _mm512_andnot_si512, _mm512_load_si512, _mm512_loadu_si512, _mm512_or_si512,
    _mm512_popcnt_epi64, _mm512_reduce_add_epi64, _mm512_setzero_si512, _mm512_sll_epi64, _mm512_srl_epi64,
    _mm512_store_si512, _mm512_test_epi64_mask,
};

use super::{GROUP, clear, count};

/// Returns the two shift counts: up by `bits`, and down by `64 - bits`.
fn counts(bits: u32) -> (__m128i, __m128i) {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { (_mm_cvtsi64_si128(i64::from(bits)), _mm_cvtsi64_si128(i64::from(64 - bits))) }
}

/// # Safety
/// The machine has AVX-512 F and VPOPCNTDQ; all slices have the same length, a multiple of GROUP; `into` is
/// aligned to 64 bytes.
#[target_feature(enable = "avx512f,avx512vpopcntdq")]
pub(super) unsafe fn avx512(into: &mut [u64], high: &[u64], low: &[u64], bits: u32) -> u64 {
    const WORDS: usize = 8;
    const VECTORS: usize = GROUP / WORDS;
    let (up, down) = counts(bits);
    let mut newly = _mm512_setzero_si512();
    let mut at = 0;
    while at < into.len() {
        let mut moved = [_mm512_setzero_si512(); VECTORS];
        for (index, moved) in moved.iter_mut().enumerate() {
            // SAFETY: each slice contains a whole group from `at` on.
            let (high, low) = unsafe {
                let at = at + index * WORDS;
                (
                    _mm512_loadu_si512(high.as_ptr().add(at).cast::<__m512i>()),
                    _mm512_loadu_si512(low.as_ptr().add(at).cast::<__m512i>()),
                )
            };
            *moved = _mm512_or_si512(_mm512_sll_epi64(high, up), _mm512_srl_epi64(low, down));
        }
        let any = _mm512_or_si512(_mm512_or_si512(moved[0], moved[1]), _mm512_or_si512(moved[2], moved[3]));
        if _mm512_test_epi64_mask(any, any) != 0 {
            for (index, moved) in moved.iter().enumerate() {
                // SAFETY: as above; `into` is aligned, and a group is a multiple of a line.
                unsafe {
                    let word = into.as_mut_ptr().add(at + index * WORDS).cast::<__m512i>();
                    let old = _mm512_load_si512(word);
                    let new = _mm512_andnot_si512(old, *moved);
                    newly = _mm512_add_epi64(newly, _mm512_popcnt_epi64(new));
                    _mm512_store_si512(word, _mm512_or_si512(old, *moved));
                }
            }
        }
        at += GROUP;
    }
    _mm512_reduce_add_epi64(newly) as u64
}

/// # Safety
/// The machine has AVX2; all slices have the same length, a multiple of GROUP; `into` is aligned to 32
/// bytes.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2(into: &mut [u64], high: &[u64], low: &[u64], bits: u32) -> u64 {
    const WORDS: usize = 4;
    const VECTORS: usize = 4;
    const { assert!(GROUP.is_multiple_of(WORDS * VECTORS)) };
    let (up, down) = counts(bits);
    let mut newly = _mm256_setzero_si256();
    let mut at = 0;
    while at < into.len() {
        let mut moved = [_mm256_setzero_si256(); VECTORS];
        for (index, moved) in moved.iter_mut().enumerate() {
            // SAFETY: four whole vectors from `at` on lie in each slice.
            let (high, low) = unsafe {
                let at = at + index * WORDS;
                (
                    _mm256_loadu_si256(high.as_ptr().add(at).cast::<__m256i>()),
                    _mm256_loadu_si256(low.as_ptr().add(at).cast::<__m256i>()),
                )
            };
            *moved = _mm256_or_si256(_mm256_sll_epi64(high, up), _mm256_srl_epi64(low, down));
        }
        let any = _mm256_or_si256(_mm256_or_si256(moved[0], moved[1]), _mm256_or_si256(moved[2], moved[3]));
        if _mm256_testz_si256(any, any) == 0 {
            for (index, moved) in moved.iter().enumerate() {
                // SAFETY: as above; `into` is aligned, and four vectors are a multiple of a line.
                unsafe {
                    let word = into.as_mut_ptr().add(at + index * WORDS).cast::<__m256i>();
                    let old = _mm256_load_si256(word);
                    newly = _mm256_add_epi64(newly, count_bits(_mm256_andnot_si256(old, *moved)));
                    _mm256_store_si256(word, _mm256_or_si256(old, *moved));
                }
            }
        }
        at += WORDS * VECTORS;
    }
    let mut sums = [0u64; WORDS];
    // SAFETY: the array has the size of the vector.
    unsafe { _mm256_storeu_si256(sums.as_mut_ptr().cast::<__m256i>(), newly) };
    sums.iter().sum()
}

/// Counts the set bits of each word, by a table lookup per half byte.
#[target_feature(enable = "avx2")]
fn count_bits(bits: __m256i) -> __m256i {
    let table = _mm256_setr_epi8(
        0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, //
        0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
    );
    let half = _mm256_set1_epi8(0x0f);
    let low = _mm256_shuffle_epi8(table, _mm256_and_si256(bits, half));
    let high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bits, 4), half));
    _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256())
}

/// # Safety
/// The machine has AVX-512 F and VPOPCNTDQ.
#[target_feature(enable = "avx512f,avx512vpopcntdq")]
pub(super) unsafe fn clear_avx512(from: &mut [u64], bits: &[u64]) -> u64 {
    clear(from, bits)
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn clear_avx2(from: &mut [u64], bits: &[u64]) -> u64 {
    clear(from, bits)
}

/// # Safety
/// The machine has AVX-512 F and VPOPCNTDQ.
#[target_feature(enable = "avx512f,avx512vpopcntdq")]
pub(super) unsafe fn count_avx512(bits: &[u64]) -> u64 {
    count(bits)
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn count_avx2(bits: &[u64]) -> u64 {
    count(bits)
}
