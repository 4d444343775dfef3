//! Checks whether pages are zero, with the best instructions that the machine has.
//!
//! The guest may write meanwhile. Each address is therefore read once, and the compiler assumes nothing about
//! the value. A page that is written during its scan may be reported as zero or not, and the dirty source
//! reports it again. If a page fails during a scan, the scan ends with its address ([`crate::guard`]).

use std::sync::OnceLock;

use crate::guard::{self, RamFault};
use crate::page::PAGE_SIZE;
use crate::slice::RamSlice;

/// Bytes per step of a scan. The first line decides most pages that are not zero.
const LINE: usize = 64;

/// The instructions for a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// 8 bytes per step; works on every machine.
    Scalar,
    /// 16 bytes per step.
    Sse2,
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

    /// Returns the best method that this machine supports.
    pub fn best() -> Method {
        static BEST: OnceLock<Method> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().copied().unwrap_or(Method::Scalar))
    }

    /// Whether all bytes of the window are zero.
    ///
    /// # Errors
    /// [`RamFault`] if one of its pages has failed.
    ///
    /// # Panics
    /// If this machine does not support the method.
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

    /// Scans the whole pages of the window, like [`RamSlice::zero_page_bits`].
    ///
    /// # Errors
    /// [`RamFault`] if one of its pages has failed.
    ///
    /// # Panics
    /// If this machine does not support the method.
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
    // SAFETY: the caller's promises are the requirements of each routine.
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

impl RamSlice<'_> {
    /// Whether every byte is zero, checked with the best instructions that this machine has.
    ///
    /// Reading a hole of a memfd populates it: see [`crate::RamBlock::mark_absent`].
    ///
    /// # Errors
    /// [`RamFault`] if one of its pages has failed.
    pub fn is_zero(&self) -> Result<bool, RamFault> {
        Method::best().is_zero(*self)
    }

    /// Scans the whole pages of the window and returns the number of zero pages.
    ///
    /// Bit `i % 64` of `bits[i / 64]` is set if page `i` is zero. Pages for which `bits` has no room are not
    /// scanned.
    ///
    /// # Errors
    /// [`RamFault`] if one of its pages has failed.
    pub fn zero_page_bits(&self, bits: &mut [u64]) -> Result<u64, RamFault> {
        Method::best().zero_page_bits(*self, bits)
    }
}
