//! Reads and writes guest RAM whose pages may fail.
//!
//! Memory can fail under a guest (an uncorrectable error, "poison"). A thread that touches the page gets
//! SIGBUS, which ends the process and its guest. All instructions of this crate that copy or scan guest RAM are
//! therefore assembly routines in one contiguous range of code. Each routine keeps in a register the address at
//! which it continues after a fault. [`handle_sigbus`] sends the thread there, and the routine reports the
//! failed address. The handler replaces no mapping, takes no lock and keeps no state, so it may run on any
//! thread at any time.
//!
//! The VMM installs the signal handler, because a process has only one. Without it, SIGBUS has its previous
//! effect. Reads and writes by the kernel (`sendmsg`, `recvmsg`, io_uring) raise no signal but fail with
//! EFAULT.

#[cfg(not(target_arch = "x86_64"))]
#[path = "guard/portable.rs"]
mod routines;
#[cfg(target_arch = "x86_64")]
#[path = "guard/x86_64.rs"]
mod routines;

pub use routines::handle_sigbus;

/// A page of guest RAM failed during a read or a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the memory at host address {address:#x} has failed (poisoned)")]
pub struct RamFault {
    /// The accessed address, in this process.
    pub address: usize,
}

/// The return value of a routine: its result, and the failed address, if any.
#[repr(C)]
struct Done {
    result: u64,
    address: u64,
}

/// Results of a scan: `FAULT` for a failed page, `ZERO` if all bytes are zero, else 0.
const FAULT: u64 = 2;
const ZERO: u64 = 1;

/// Copies `len` bytes. The error contains the address whose access failed.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, except for failed pages, and must not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), RamFault> {
    // SAFETY: the caller's promise is the requirement of the routine.
    let done = unsafe { routines::sterna_ram_copy(to, from, len) };
    moved(done)
}

/// Stores `len` zero bytes. The error contains the address whose access failed.
///
/// # Safety
/// The range must be valid for `len` bytes, except for failed pages.
pub(crate) unsafe fn fill_zero(to: *mut u8, len: usize) -> Result<(), RamFault> {
    // SAFETY: the caller's promise is the requirement of the routine.
    let done = unsafe { routines::sterna_ram_fill_zero(to, len) };
    moved(done)
}

fn moved(done: Done) -> Result<(), RamFault> {
    if done.result == 0 { Ok(()) } else { Err(RamFault { address: done.address as usize }) }
}

fn scanned(done: Done) -> Result<bool, RamFault> {
    match done.result {
        FAULT => Err(RamFault { address: done.address as usize }),
        result => Ok(result == ZERO),
    }
}

/// Defines a function that calls one of the scan routines.
macro_rules! scan {
    ($(#[$attribute:meta])* $name:ident, $routine:ident, $needs:literal) => {
        /// Whether all bytes of the range are zero.
        ///
        /// # Safety
        #[doc = $needs]
        $(#[$attribute])*
        pub(crate) unsafe fn $name(start: *const u8, count: usize) -> Result<bool, RamFault> {
            // SAFETY: the caller's promise is the requirement of the routine.
            scanned(unsafe { routines::$routine(start, count) })
        }
    };
}

scan!(bytes_zero, sterna_ram_zero_bytes, "`count` bytes from `start` on must be mapped.");
scan!(
    lines_scalar,
    sterna_ram_zero_scalar,
    "`count` lines of 64 bytes from `start` on must be mapped; aligned to 8."
);
scan!(
    #[cfg(target_arch = "x86_64")]
    lines_sse2,
    sterna_ram_zero_sse2,
    "`count` lines of 64 bytes from `start` on must be mapped; aligned to 64."
);
scan!(
    #[cfg(target_arch = "x86_64")]
    lines_avx2,
    sterna_ram_zero_avx2,
    "As `lines_sse2`, and the machine must have AVX2."
);
scan!(
    #[cfg(target_arch = "x86_64")]
    lines_avx512,
    sterna_ram_zero_avx512,
    "As `lines_sse2`, and the machine must have AVX-512F."
);
