//! The assembly routines, and the signal handler that ends them after a fault.
//!
//! No routine uses the stack or calls a function, so a plain return is possible from every instruction. The
//! compiler cannot see into them, so it makes no assumption that the guest's concurrent writes could violate.

use super::Done;
use crate::page::PAGE_BYTES;

/// Handles a SIGBUS of a copy or scan of guest RAM, which returns a [`super::RamFault`] then.
///
/// `false` means that the signal has another origin: the guest's own access through KVM, or another part of the
/// process. The caller must handle it, or restore the default action and return, which ends the process.
///
/// The VMM's SIGBUS handler, installed with `SA_SIGINFO`, calls this with its second and third argument. The
/// function is async-signal-safe: it changes only the saved registers of the interrupted thread.
///
/// # Safety
/// `info` and `context` must be the arguments that the kernel passed to the handler that runs now.
pub unsafe fn handle_sigbus(info: *const libc::siginfo_t, context: *mut libc::c_void) -> bool {
    /// Codes for an access by the interrupted instruction. The page is beyond the end of a shortened file, or
    /// has failed. BUS_MCEERR_AO is left out: it reports a failed page that no thread is reading, and can
    /// interrupt any instruction.
    const SYNCHRONOUS: [libc::c_int; 3] = [libc::BUS_ADRERR, libc::BUS_OBJERR, libc::BUS_MCEERR_AR];
    if info.is_null() || context.is_null() {
        return false;
    }
    // SAFETY: both are the arguments that the kernel passed to the running handler (the caller's promise). They
    // are a filled siginfo_t, and the ucontext_t on the handler's stack, which only this handler uses.
    let (info, registers) = unsafe { (&*info, &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs) };
    let begin = (&raw const sterna_ram_guard_begin) as u64;
    let end = (&raw const sterna_ram_guard_end) as u64;
    let at = registers[libc::REG_RIP as usize] as u64;
    if !SYNCHRONOUS.contains(&info.si_code) || !(begin..end).contains(&at) {
        return false;
    }
    // SAFETY: a SIGBUS of these codes carries an address.
    let address = unsafe { info.si_addr() };
    // The routines' own code has failed; its address or its page shows that. No routine can continue then, and
    // before the first instruction of a routine, R11 contains the caller's value.
    let text = begin / PAGE_BYTES * PAGE_BYTES..end.next_multiple_of(PAGE_BYTES);
    if text.contains(&(address as u64)) {
        return false;
    }
    // From its first instruction on, every routine keeps in R11 its exit after a fault, and returns RDX. The
    // first instruction touches no memory, so a fault on other memory follows later.
    registers[libc::REG_RIP as usize] = registers[libc::REG_R11 as usize];
    registers[libc::REG_RDX as usize] = address as i64;
    true
}

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

// In: RDI, RSI, RDX. Out: RAX is the result, RDX the address of a fault. R11 is the exit after a fault. After a
// fault in a copy, RCX is the number of missing bytes, which is the result.
//
// A scan checks the first line separately, because it decides most pages that are not zero. Blocks of four
// lines follow, because the test costs more than the ORs, and then the remaining lines.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the handler for a fault on `address` at instruction `at`, with `way_out` in R11.
    ///
    /// Returns the handler's result and the address at which the thread continues.
    fn handled(address: u64, at: u64, way_out: u64) -> (bool, u64) {
        /// Offset of `si_addr` in `siginfo_t`.
        const ADDRESS_OFFSET: usize = 16;
        // SAFETY: both are plain data, for which zeros are valid.
        let (mut info, mut context): (libc::siginfo_t, libc::ucontext_t) = unsafe { std::mem::zeroed() };
        info.si_code = libc::BUS_MCEERR_AR;
        // SAFETY: inside the structure, where the kernel writes the address of a fault.
        unsafe { (&raw mut info).byte_add(ADDRESS_OFFSET).cast::<u64>().write_unaligned(address) };
        let registers = &mut context.uc_mcontext.gregs;
        registers[libc::REG_RIP as usize] = at as i64;
        registers[libc::REG_R11 as usize] = way_out as i64;
        // SAFETY: filled like the kernel does; the handler reads only these registers.
        let taken = unsafe { handle_sigbus(&raw const info, (&raw mut context).cast()) };
        (taken, context.uc_mcontext.gregs[libc::REG_RIP as usize] as u64)
    }

    #[test]
    fn fault_of_other_memory_under_a_routine_goes_where_the_routine_says() {
        let begin = (&raw const sterna_ram_guard_begin) as u64;

        assert_eq!(handled(0x7000, begin + 16, 0x1234), (true, 0x1234));
    }

    #[test]
    fn fault_of_the_routines_own_text_is_not_taken() {
        let begin = (&raw const sterna_ram_guard_begin) as u64;
        // R11 still contains the caller's value, an arbitrary address.
        for address in [begin, begin / PAGE_BYTES * PAGE_BYTES] {
            assert_eq!(handled(address, begin, 0xdead), (false, begin), "{address:#x}");
        }
    }
}
