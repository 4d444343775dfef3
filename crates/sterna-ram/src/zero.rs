//! Telling whether a page is zero, by the best instructions the machine has.
//!
//! Guest RAM is written meanwhile: each address is read once, as it comes, and the compiler assumes nothing
//! about what is found. A page that is being written is reported either way; the dirty source reports it again.
//! A page that fails under a scan ends it with its address ([`crate::guard`]).

use std::sync::OnceLock;

use crate::guard::{self, RamFault};
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
    /// # Errors
    /// [`RamFault`] if a page of it has failed.
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn is_zero(self, window: RamSlice<'_>) -> Result<bool, RamFault> {
        assert!(self == Method::best() || Self::available().contains(&self));
        let (start, len) = (window.as_ptr().cast_const(), window.len());
        let head = start.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail divide the window, which is mapped; the middle is aligned to
        // LINE; the machine has the instructions (asserted above).
        unsafe {
            if head == 0 && tail == len {
                return lines_zero(self, start, lines);
            }
            Ok(guard::bytes_zero(start, head)?
                && lines_zero(self, start.add(head), lines)?
                && guard::bytes_zero(start.add(tail), len - tail)?)
        }
    }

    /// Scans the window's whole pages, as [`RamSlice::zero_page_bits`].
    ///
    /// # Errors
    /// [`RamFault`] if a page of it has failed.
    ///
    /// # Panics
    /// If this machine cannot do the method.
    pub fn zero_page_bits(self, window: RamSlice<'_>, bits: &mut [u64]) -> Result<u64, RamFault> {
        let pages = (window.len() / PAGE_SIZE).min(bits.len() * 64);
        let mut zero = 0;
        for (index, word) in bits.iter_mut().enumerate() {
            *word = 0;
            for page in index * 64..pages.min(index * 64 + 64) {
                // `page` is below the number of whole pages, so the part exists.
                let Some(part) = window.part(page * PAGE_SIZE, PAGE_SIZE) else { break };
                if self.is_zero(part)? {
                    *word |= 1 << (page % 64);
                    zero += 1;
                }
            }
        }
        Ok(zero)
    }
}

/// # Safety
/// `start` must be aligned to LINE, `lines` lines from there must be mapped, and the machine must have
/// the method's instructions.
unsafe fn lines_zero(method: Method, start: *const u8, lines: usize) -> Result<bool, RamFault> {
    // SAFETY: the caller's promises are what each of these asks for.
    unsafe {
        match method {
            Method::Scalar => guard::lines_scalar(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Sse2 => guard::lines_sse2(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => guard::lines_avx2(start, lines),
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => guard::lines_avx512(start, lines),
            #[cfg(not(target_arch = "x86_64"))]
            _ => guard::lines_scalar(start, lines),
        }
    }
}
