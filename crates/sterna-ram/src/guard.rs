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

/// Takes a SIGBUS that a copy or a scan of guest RAM has raised, so that it ends with a [`RamFault`] when the handler
/// returns. False: the signal came from elsewhere (the guest's own access through KVM, another part of the process),
/// and the caller deals with it, or restores the default action and returns, which ends the process as before.
///
/// To be called by the VMM's handler of SIGBUS, which was installed with `SA_SIGINFO`, with the handler's second and
/// third argument. Async-signal-safe: touches the interrupted thread's saved registers and nothing else.
///
/// # Safety
/// `info` and `context` must be what the kernel gave to the handler that is running now.
#[cfg(target_arch = "x86_64")]
pub unsafe fn handle_sigbus(info: *const libc::siginfo_t, context: *mut libc::c_void) -> bool {
    /// A page that cannot be had (a file that became shorter), and one that has failed under this very instruction.
    /// The third, that a page has failed which nobody is reading (BUS_MCEERR_AO), interrupts anything.
    const SYNCHRONOUS: [libc::c_int; 3] = [libc::BUS_ADRERR, libc::BUS_OBJERR, libc::BUS_MCEERR_AR];
    if info.is_null() || context.is_null() {
        return false;
    }
    // SAFETY: both are what the kernel gave to the running handler (the caller's promise): a filled siginfo_t, and the
    // ucontext_t on the handler's stack, which nobody else uses while it runs.
    let (info, registers) = unsafe { (&*info, &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs) };
    let begin = (&raw const routines::sterna_ram_guard_begin) as u64;
    let end = (&raw const routines::sterna_ram_guard_end) as u64;
    let at = registers[libc::REG_RIP as usize] as u64;
    if !SYNCHRONOUS.contains(&info.si_code) || !(begin..end).contains(&at) {
        return false;
    }
    // SAFETY: a SIGBUS of these codes carries an address.
    let address = unsafe { info.si_addr() };
    // Every routine keeps in R11 where it ends after a fault, from its first instruction on, and gives RDX back.
    registers[libc::REG_RIP as usize] = registers[libc::REG_R11 as usize];
    registers[libc::REG_RDX as usize] = address as i64;
    true
}

/// On this architecture copies and scans are not guarded, so the signal is never theirs.
///
/// # Safety
/// None is needed; as on other architectures.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn handle_sigbus(_: *const libc::siginfo_t, _: *mut libc::c_void) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod routines {
    //! The routines. None uses the stack or calls anything, so that leaving them from any instruction on is a plain
    //! return. Being opaque to the compiler they make no assumption that the guest's concurrent writes could break.

    use super::Done;

    unsafe extern "C" {
        pub(super) static sterna_ram_guard_begin: u8;
        pub(super) static sterna_ram_guard_end: u8;
        pub(super) fn sterna_ram_copy(to: *mut u8, from: *const u8, len: usize) -> Done;
        pub(super) fn sterna_ram_fill_zero(to: *mut u8, len: usize) -> Done;
        pub(super) fn sterna_ram_zero_bytes(start: *const u8, len: usize) -> Done;
        pub(super) fn sterna_ram_zero_scalar(start: *const u8, lines: usize) -> Done;
        pub(super) fn sterna_ram_zero_sse2(start: *const u8, lines: usize) -> Done;
        pub(super) fn sterna_ram_zero_avx2(start: *const u8, lines: usize) -> Done;
        pub(super) fn sterna_ram_zero_avx512(start: *const u8, lines: usize) -> Done;
    }

    // In: RDI, RSI, RDX. Out: RAX the result, RDX the address of a fault. R11 is where to go on after one; a copy that
    // was left has its missing bytes in RCX, which is the result.
    //
    // A scan looks at the first line alone, which decides most pages that are not zero, then at blocks of four lines
    // (the test costs more than the ORs), then at the lines that are left.
    std::arch::global_asm!(
        r#"
        .pushsection .text.sterna_ram_guard, "ax", @progbits
        .p2align 6
        .globl sterna_ram_guard_begin
sterna_ram_guard_begin:

        .globl sterna_ram_copy
        .type sterna_ram_copy, @function
sterna_ram_copy:
        lea r11, [rip + 2f]
        mov rcx, rdx
        xor edx, edx
        rep movsb
2:      mov rax, rcx
        ret

        .globl sterna_ram_fill_zero
        .type sterna_ram_fill_zero, @function
sterna_ram_fill_zero:
        lea r11, [rip + 2f]
        mov rcx, rsi
        xor eax, eax
        xor edx, edx
        rep stosb
2:      mov rax, rcx
        ret

        .globl sterna_ram_zero_bytes
        .type sterna_ram_zero_bytes, @function
sterna_ram_zero_bytes:
        lea r11, [rip + 9f]
        xor edx, edx
        test rsi, rsi
        jz 7f
2:      cmp byte ptr [rdi], 0
        jne 8f
        inc rdi
        dec rsi
        jnz 2b
7:      mov eax, 1
        ret
8:      xor eax, eax
        ret
9:      mov eax, 2
        ret

        .macro sterna_ram_first_line
        lea r11, [rip + 9f]
        xor edx, edx
        test rsi, rsi
        jz 7f
        mov rax, [rdi]
        .irp at, 8, 16, 24, 32, 40, 48, 56
        or rax, [rdi + \at]
        .endr
        jnz 8f
        add rdi, 64
        dec rsi
        jz 7f
        .endm

        .globl sterna_ram_zero_scalar
        .type sterna_ram_zero_scalar, @function
sterna_ram_zero_scalar:
        sterna_ram_first_line
2:      mov rax, [rdi]
        .irp at, 8, 16, 24, 32, 40, 48, 56
        or rax, [rdi + \at]
        .endr
        jnz 8f
        add rdi, 64
        dec rsi
        jnz 2b
7:      mov eax, 1
        ret
8:      xor eax, eax
        ret
9:      mov eax, 2
        ret

        .globl sterna_ram_zero_sse2
        .type sterna_ram_zero_sse2, @function
        .p2align 6
sterna_ram_zero_sse2:
        sterna_ram_first_line
        pxor xmm4, xmm4
        sub rsi, 4
        jb 4f
3:      movdqa xmm0, [rdi]
        movdqa xmm1, [rdi + 16]
        movdqa xmm2, [rdi + 32]
        movdqa xmm3, [rdi + 48]
        .irp at, 64, 128, 192
        por xmm0, [rdi + \at]
        por xmm1, [rdi + \at + 16]
        por xmm2, [rdi + \at + 32]
        por xmm3, [rdi + \at + 48]
        .endr
        por xmm0, xmm1
        por xmm2, xmm3
        por xmm0, xmm2
        pcmpeqb xmm0, xmm4
        pmovmskb eax, xmm0
        cmp eax, 65535
        jne 8f
        add rdi, 256
        sub rsi, 4
        jae 3b
4:      add rsi, 4
        jz 7f
5:      movdqa xmm0, [rdi]
        por xmm0, [rdi + 16]
        por xmm0, [rdi + 32]
        por xmm0, [rdi + 48]
        pcmpeqb xmm0, xmm4
        pmovmskb eax, xmm0
        cmp eax, 65535
        jne 8f
        add rdi, 64
        dec rsi
        jnz 5b
7:      mov eax, 1
        ret
8:      xor eax, eax
        ret
9:      mov eax, 2
        ret

        .globl sterna_ram_zero_avx2
        .type sterna_ram_zero_avx2, @function
        .p2align 6
sterna_ram_zero_avx2:
        sterna_ram_first_line
        sub rsi, 4
        jb 4f
3:      vmovdqa ymm0, [rdi]
        vmovdqa ymm1, [rdi + 32]
        vmovdqa ymm2, [rdi + 64]
        vmovdqa ymm3, [rdi + 96]
        vpor ymm0, ymm0, [rdi + 128]
        vpor ymm1, ymm1, [rdi + 160]
        vpor ymm2, ymm2, [rdi + 192]
        vpor ymm3, ymm3, [rdi + 224]
        vpor ymm0, ymm0, ymm1
        vpor ymm2, ymm2, ymm3
        vpor ymm0, ymm0, ymm2
        vptest ymm0, ymm0
        jnz 6f
        add rdi, 256
        sub rsi, 4
        jae 3b
4:      add rsi, 4
        jz 2f
5:      vmovdqa ymm0, [rdi]
        vpor ymm0, ymm0, [rdi + 32]
        vptest ymm0, ymm0
        jnz 6f
        add rdi, 64
        dec rsi
        jnz 5b
2:      vzeroupper
7:      mov eax, 1
        ret
6:      vzeroupper
8:      xor eax, eax
        ret
9:      vzeroupper
        mov eax, 2
        ret

        .globl sterna_ram_zero_avx512
        .type sterna_ram_zero_avx512, @function
        .p2align 6
sterna_ram_zero_avx512:
        sterna_ram_first_line
        sub rsi, 4
        jb 4f
3:      vmovdqa64 zmm0, [rdi]
        vmovdqa64 zmm1, [rdi + 64]
        vporq zmm0, zmm0, [rdi + 128]
        vporq zmm1, zmm1, [rdi + 192]
        vporq zmm0, zmm0, zmm1
        vptestmq k1, zmm0, zmm0
        kortestw k1, k1
        jnz 6f
        add rdi, 256
        sub rsi, 4
        jae 3b
4:      add rsi, 4
        jz 2f
5:      vmovdqa64 zmm0, [rdi]
        vptestmq k1, zmm0, zmm0
        kortestw k1, k1
        jnz 6f
        add rdi, 64
        dec rsi
        jnz 5b
2:      vzeroupper
7:      mov eax, 1
        ret
6:      vzeroupper
8:      xor eax, eax
        ret
9:      vzeroupper
        mov eax, 2
        ret

        .purgem sterna_ram_first_line
        .globl sterna_ram_guard_end
sterna_ram_guard_end:
        .popsection
        "#
    );
}

#[cfg(not(target_arch = "x86_64"))]
mod routines {
    //! Without a guard.

    use std::ptr;

    use super::{Done, ZERO};

    pub(super) unsafe fn sterna_ram_copy(to: *mut u8, from: *const u8, len: usize) -> Done {
        for index in 0..len {
            // SAFETY: inside both ranges.
            unsafe { ptr::write_volatile(to.add(index), ptr::read_volatile(from.add(index))) };
        }
        Done { result: 0, address: 0 }
    }

    pub(super) unsafe fn sterna_ram_fill_zero(to: *mut u8, len: usize) -> Done {
        for index in 0..len {
            // SAFETY: inside the range.
            unsafe { ptr::write_volatile(to.add(index), 0) };
        }
        Done { result: 0, address: 0 }
    }

    pub(super) unsafe fn sterna_ram_zero_bytes(start: *const u8, len: usize) -> Done {
        // SAFETY: inside the range.
        let is_zero = (0..len).all(|index| unsafe { ptr::read_volatile(start.add(index)) } == 0);
        Done { result: if is_zero { ZERO } else { 0 }, address: 0 }
    }

    pub(super) unsafe fn sterna_ram_zero_scalar(start: *const u8, lines: usize) -> Done {
        let words = start.cast::<u64>();
        // SAFETY: inside the lines, aligned to 8.
        let is_zero = (0..lines * 8).all(|index| unsafe { ptr::read_volatile(words.add(index)) } == 0);
        Done { result: if is_zero { ZERO } else { 0 }, address: 0 }
    }
}
