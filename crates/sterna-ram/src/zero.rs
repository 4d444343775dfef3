//! Telling whether a page is zero, by the best instructions the machine has.
//!
//! Guest RAM is written meanwhile, so all loads are volatile: each address is read once, as it comes,
//! and the compiler assumes nothing about what it finds. A page that is being written is reported either
//! way; the dirty source reports it again.

use std::ptr;
use std::sync::OnceLock;

use crate::{PAGE_SIZE, RamSlice};

/// The unit in which the scans go; the first one decides most pages that are not zero.
const LINE: usize = 64;

/// How to scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Words of eight bytes; works everywhere.
    Scalar,
    /// 16 bytes at once.
    Sse2,
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
                found.push(Method::Sse2);
                if is_x86_feature_detected!("avx2") {
                    found.push(Method::Avx2);
                }
                if is_x86_feature_detected!("avx512f") {
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

    /// Whether all of the window's bytes are zero.
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn is_zero(self, window: RamSlice<'_>) -> bool {
        assert!(self == Method::best() || Self::available().contains(&self));
        let (start, len) = (window.as_ptr().cast_const(), window.len());
        let head = start.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail divide the window, which is mapped; the middle is aligned to
        // LINE; the machine has the instructions (asserted above).
        unsafe {
            bytes_zero(start, head)
                && lines_zero(self, start.add(head), lines)
                && bytes_zero(start.add(tail), len - tail)
        }
    }

    /// Scans the window's whole pages, as [`RamSlice::zero_page_bits`].
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn zero_page_bits(self, window: RamSlice<'_>, bits: &mut [u64]) -> u64 {
        let pages = (window.len() / PAGE_SIZE).min(bits.len() * 64);
        let mut zero = 0;
        for (index, word) in bits.iter_mut().enumerate() {
            *word = 0;
            for page in index * 64..pages.min(index * 64 + 64) {
                // `page` is below the number of whole pages, so the part exists.
                let Some(part) = window.part(page * PAGE_SIZE, PAGE_SIZE) else { break };
                if self.is_zero(part) {
                    *word |= 1 << (page % 64);
                    zero += 1;
                }
            }
        }
        zero
    }
}

/// # Safety
/// `[start, start + len)` must be mapped.
unsafe fn bytes_zero(start: *const u8, len: usize) -> bool {
    // SAFETY: inside the range.
    (0..len).all(|index| unsafe { ptr::read_volatile(start.add(index)) } == 0)
}

/// # Safety
/// `start` must be aligned to LINE, `lines` lines from there must be mapped, and the machine must have
/// the method's instructions.
unsafe fn lines_zero(method: Method, start: *const u8, lines: usize) -> bool {
    // SAFETY: the caller's promises are what each of these asks for.
    unsafe {
        if lines == 0 {
            return true;
        }
        if !scalar(start, 1) {
            return false;
        }
        let (start, lines) = (start.add(LINE), lines - 1);
        match method {
            Method::Scalar => scalar(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Sse2 => x86::sse2(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => x86::avx2(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => x86::avx512(start, lines),
            #[cfg(not(target_arch = "x86_64"))]
            _ => scalar(start, lines),
        }
    }
}

/// # Safety
/// As `lines_zero`.
unsafe fn scalar(start: *const u8, lines: usize) -> bool {
    let words = start.cast::<u64>();
    for line in 0..lines {
        let mut any = 0;
        for word in 0..LINE / 8 {
            // SAFETY: inside the lines, aligned to 8.
            any |= unsafe { ptr::read_volatile(words.add(line * (LINE / 8) + word)) };
        }
        if any != 0 {
            return false;
        }
    }
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! One loop per instruction set, over blocks of four lines (the test costs more than the ORs) and
    //! then the lines that are left.

    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128,
        _mm256_or_si256, _mm256_setzero_si256, _mm256_testz_si256, _mm512_or_si512, _mm512_setzero_si512,
        _mm512_test_epi64_mask,
    };
    use std::ptr;

    use super::LINE;

    /// Writes the loop for one vector type.
    macro_rules! scan {
        ($name:ident, $feature:literal, $vector:ty, $zero:ident, $or:ident, $is_zero:expr) => {
            /// # Safety
            /// `start` aligned to LINE, `lines` lines mapped, and the machine has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(start: *const u8, lines: usize) -> bool {
                const IN_LINE: usize = LINE / size_of::<$vector>();
                let vectors = start.cast::<$vector>();
                let mut at = 0;
                while at < lines * IN_LINE {
                    let left = lines * IN_LINE - at;
                    let step = if left >= 4 * IN_LINE { 4 * IN_LINE } else { IN_LINE };
                    let mut any = $zero();
                    if step == 4 * IN_LINE {
                        for index in 0..4 * IN_LINE {
                            // SAFETY: inside the lines; aligned, as LINE is a multiple of the vector.
                            any = $or(any, unsafe { ptr::read_volatile(vectors.add(at + index)) });
                        }
                    } else {
                        for index in 0..IN_LINE {
                            // SAFETY: as above.
                            any = $or(any, unsafe { ptr::read_volatile(vectors.add(at + index)) });
                        }
                    }
                    if !$is_zero(any) {
                        return false;
                    }
                    at += step;
                }
                true
            }
        };
    }

    scan!(sse2, "sse2", __m128i, _mm_setzero_si128, _mm_or_si128, |any: __m128i| {
        _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) == 0xffff
    });
    scan!(avx2, "avx2", __m256i, _mm256_setzero_si256, _mm256_or_si256, |any: __m256i| {
        _mm256_testz_si256(any, any) != 0
    });
    scan!(avx512, "avx512f", __m512i, _mm512_setzero_si512, _mm512_or_si512, |any: __m512i| {
        _mm512_test_epi64_mask(any, any) == 0
    });
}
