//! Reading and writing guest RAM whose pages may fail.
//!
//! Memory of this machine can fail under a guest (an uncorrectable error, "poison"), and then whoever touches the page
//! gets SIGBUS, which ends the process and with it the guest. So all instructions of this crate that copy or scan
//! guest RAM are written in assembly and stand in one piece of text. They keep in a register where to go on if a page
//! fails; [`handle_sigbus`] sends them there, and they report the address. Nothing else is touched: no mapping is
//! replaced under the guest, no lock is taken, no state is kept, so the handler may run on any thread at any time.
//!
//! The handler of the signal belongs to the VMM, since a process has only one. Without it SIGBUS does what it did
//! before. What the kernel reads and writes for us (`sendmsg`, `recvmsg`, io_uring) raises no signal: it says EFAULT.

#[cfg(not(target_arch = "x86_64"))]
#[path = "guard/portable.rs"]
mod routines;
#[cfg(target_arch = "x86_64")]
#[path = "guard/x86_64.rs"]
mod routines;

pub use routines::handle_sigbus;

/// A page of guest RAM failed while it was read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the memory at host address {address:#x} has failed (poisoned)")]
pub struct RamFault {
    /// The address that was touched, in this process.
    pub address: usize,
}

/// What a routine says: its result, and the address that failed if `result` says so.
#[repr(C)]
struct Done {
    result: u64,
    address: u64,
}

/// The result of a scan that failed; `ZERO` and 0 are the others.
const FAULT: u64 = 2;
const ZERO: u64 = 1;

/// Copies `len` bytes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes but for pages that fail, and must not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), RamFault> {
    // SAFETY: the caller's promise is what the routine asks for.
    let done = unsafe { routines::sterna_ram_copy(to, from, len) };
    moved(done)
}

/// Stores `len` zero bytes.
///
/// # Safety
/// The range must be valid for `len` bytes but for pages that fail.
pub(crate) unsafe fn fill_zero(to: *mut u8, len: usize) -> Result<(), RamFault> {
    // SAFETY: the caller's promise is what the routine asks for.
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

/// Writes what calls one of the scans.
macro_rules! scan {
    ($(#[$attribute:meta])* $name:ident, $routine:ident, $needs:literal) => {
        /// Whether all of it is zero.
        ///
        /// # Safety
        #[doc = $needs]
        $(#[$attribute])*
        pub(crate) unsafe fn $name(start: *const u8, count: usize) -> Result<bool, RamFault> {
            // SAFETY: the caller's promise is what the routine asks for.
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
