//! Guests with state that must survive a move: timers, clocks, registers.
//!
//! Each is flat 64-bit code (`sterna_vmm::layout`) that stores its results in the words at [`BOARD`].

use std::arch::global_asm;

/// Physical address of the words in which guests store their results.
pub const BOARD: u64 = 0x20_0000;

/// Offsets of words on the timer guest's board, and values of its parameter 0.
pub mod timer {
    /// Number of interrupts of the LAPIC's timer.
    pub const LAPIC_TICKS: u64 = 0;
    /// Number of interrupts of the PIT, through the IOAPIC.
    pub const PIT_TICKS: u64 = 8;
    /// 1 after all timers are armed.
    pub const ARMED: u64 = 16;
    /// TSC value at which the deadline timer must fire.
    pub const DEADLINE: u64 = 24;
    /// TSC value at the last interrupt of the LAPIC's timer.
    pub const FIRED: u64 = 32;
    /// Number of times that the guest woke up.
    pub const HEARTBEAT: u64 = 40;
    /// Value of parameter 0: the LAPIC timer is periodic.
    pub const PERIODIC: u64 = 0;
    /// Value of parameter 0: the LAPIC timer fires once.
    pub const ONE_SHOT: u64 = 1;
    /// Value of parameter 0: the LAPIC timer fires at a TSC value.
    pub const TSC_DEADLINE: u64 = 2;
}

/// Offsets of words on the clock guest's board.
pub mod clock {
    /// The last reading of the TSC.
    pub const TSC: u64 = 0;
    /// The longest step between two readings of the TSC, in ticks.
    pub const TSC_GAP: u64 = 8;
    /// The last reading of kvmclock, in ns.
    pub const NANOSECONDS: u64 = 16;
    /// The longest step between two readings of kvmclock, in ns.
    pub const NANOSECONDS_GAP: u64 = 24;
    /// Number of rounds so far.
    pub const HEARTBEAT: u64 = 32;
}

/// Offset on the register guest's board: 1 after XCR0 is set.
pub const REGISTERS_READY: u64 = 48;
/// Offset on the register guest's board: the test sets this word to 1.
pub const REGISTERS_GO: u64 = 56;
/// Offset on the register guest's board: number of rounds so far.
pub const REGISTERS_HEARTBEAT: u64 = 40;

macro_rules! blob {
    ($(#[$doc:meta])* $name:ident, $start:ident, $end:ident) => {
        $(#[$doc])*
        pub fn $name() -> Vec<u8> {
            unsafe extern "C" {
                static $start: u8;
                static $end: u8;
            }
            // SAFETY: both labels are in one section of this program, the second after the first.
            unsafe {
                let (start, end) = (std::ptr::addr_of!($start), std::ptr::addr_of!($end));
                std::slice::from_raw_parts(start, end as usize - start as usize).to_vec()
            }
        }
    };
}

blob!(
    /// Runs timers. Parameters: kind of LAPIC timer, and its count (or TSC ticks). The PIT ticks at 100 Hz in
    /// parallel.
    timer_guest,
    interop_timer_start,
    interop_timer_end
);
blob!(
    /// Reads TSC and kvmclock in a loop. Ends with 0xe1 if the TSC goes back, with 0xe2 if kvmclock does.
    clock_guest,
    interop_clock_start,
    interop_clock_end
);
blob!(
    /// Enables x87, SSE and AVX in XCR0, sets [`REGISTERS_READY`] and waits for [`REGISTERS_GO`]. Then fills
    /// these registers once and compares them in an endless loop: ymm (by xrstor, read back by xsave), x87,
    /// mxcsr, debug and model-specific. If one changes, ends with 0xe3 (ymm), 0xe4 (mxcsr), 0xe5 (x87), 0xe6
    /// (debug) or 0xe7 (MSR).
    register_guest,
    interop_registers_start,
    interop_registers_end
);

global_asm!(
    r#"
    .pushsection .rodata.sterna_interop, "a"

    interop_timer_start:
    mov r15, rsi
    mov rbp, 0x200000
    lea rax, [rip + 6f]
    mov edi, 0x40
    call 5f
    lea rax, [rip + 7f]
    mov edi, 0x50
    call 5f
    lea rax, [rip + 8f]
    mov edi, 0xff
    call 5f
    sub rsp, 16
    mov word ptr [rsp], 0xfff
    mov rax, 0x300000
    mov [rsp + 2], rax
    lidt [rsp]
    add rsp, 16
    mov al, 0xff                        // both PICs silent
    out 0x21, al
    out 0xa1, al
    mov r12d, 0xfee00000                // LAPIC on
    mov dword ptr [r12 + 0xf0], 0x1ff
    mov dword ptr [r12 + 0x80], 0
    mov r13d, 0xfec00000                // IOAPIC pin 0, KVM's route of the PIT: vector 0x50, edge, to vCPU 0
    mov dword ptr [r13], 0x11
    mov dword ptr [r13 + 0x10], 0
    mov dword ptr [r13], 0x10
    mov dword ptr [r13 + 0x10], 0x50
    mov al, 0x34                        // PIT channel 0, mode 2, 100 Hz
    out 0x43, al
    mov al, 0x9c
    out 0x40, al
    mov al, 0x2e
    out 0x40, al
    mov dword ptr [r12 + 0x3e0], 3      // divide by 16
    mov rax, [r15 + 112]
    mov rbx, [r15 + 120]
    cmp eax, 1
    je 2f
    cmp eax, 2
    je 3f
    mov dword ptr [r12 + 0x320], 0x20040
    mov [r12 + 0x380], ebx
    jmp 4f
    2:
    mov dword ptr [r12 + 0x320], 0x40
    mov [r12 + 0x380], ebx
    jmp 4f
    3:
    mov dword ptr [r12 + 0x320], 0x40040
    rdtsc
    shl rdx, 32
    or rax, rdx
    add rax, rbx
    mov [rbp + 24], rax
    mov rdx, rax
    shr rdx, 32
    mov ecx, 0x6e0
    wrmsr
    4:
    mov qword ptr [rbp + 16], 1
    sti
    9:
    hlt
    inc qword ptr [rbp + 40]
    jmp 9b
    5:                                  // interrupt gate: vector edi, handler rax
    mov r10d, edi
    shl r10, 4
    add r10, 0x300000
    mov [r10], ax
    mov word ptr [r10 + 2], 8
    mov word ptr [r10 + 4], 0x8e00
    shr rax, 16
    mov [r10 + 6], ax
    shr rax, 16
    mov [r10 + 8], eax
    mov dword ptr [r10 + 12], 0
    ret
    6:                                  // LAPIC timer
    push rax
    push rdx
    inc qword ptr [rbp]
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov [rbp + 32], rax
    mov dword ptr [r12 + 0xb0], 0
    pop rdx
    pop rax
    iretq
    7:                                  // PIT
    inc qword ptr [rbp + 8]
    mov dword ptr [r12 + 0xb0], 0
    iretq
    8:                                  // spurious
    iretq
    interop_timer_end:

    interop_clock_start:
    mov rbp, 0x200000
    mov r14, 0x202000
    mov ecx, 0x4b564d01                 // kvmclock on, its page at 0x202000
    mov eax, 0x202001
    xor edx, edx
    wrmsr
    2:
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov rbx, [rbp]
    mov [rbp], rax
    test rbx, rbx
    jz 3f
    sub rax, rbx
    jb 8f
    cmp rax, [rbp + 8]
    jbe 3f
    mov [rbp + 8], rax
    3:
    mov r9d, [r14]
    test r9d, 1
    jnz 3b
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, [r14 + 8]
    movsx ecx, byte ptr [r14 + 28]
    test ecx, ecx
    js 4f
    shl rax, cl
    jmp 5f
    4:
    neg ecx
    shr rax, cl
    5:
    mov edx, [r14 + 24]
    mul rdx
    shrd rax, rdx, 32
    add rax, [r14 + 16]
    cmp r9d, [r14]
    jne 3b
    mov rbx, [rbp + 16]
    mov [rbp + 16], rax
    test rbx, rbx
    jz 6f
    sub rax, rbx
    jb 9f
    cmp rax, [rbp + 24]
    jbe 6f
    mov [rbp + 24], rax
    6:
    inc qword ptr [rbp + 32]
    jmp 2b
    8:
    mov al, 0xe1
    out 0xf4, al
    jmp 8b
    9:
    mov al, 0xe2
    out 0xf4, al
    jmp 9b
    interop_clock_end:

    .macro interop_wrmsr index, value
    mov ecx, \index
    mov rax, \value
    mov rdx, rax
    shr rdx, 32
    wrmsr
    .endm

    .macro interop_check_msr index, value
    mov ecx, \index
    rdmsr
    shl rdx, 32
    or rax, rdx
    mov rbx, \value
    cmp rax, rbx
    mov al, 0xe7
    jne 9f
    .endm

    .macro interop_check_debug number, value
    mov rax, dr\number
    cmp rax, \value
    mov al, 0xe6
    jne 9f
    .endm

    interop_registers_start:
    mov rbp, 0x200000
    mov rax, cr4                        // xsave on: x87, SSE, AVX
    or eax, 0x40000
    mov cr4, rax
    xor ecx, ecx
    xor edx, edx
    mov eax, 7
    xsetbv
    mov qword ptr [rbp + 48], 1
    8:
    pause
    cmp qword ptr [rbp + 56], 0
    je 8b
    mov rax, 0x9e3779b97f4a7c15         // what the ymm registers hold: an xsave area at 0x201000,
    mov rbx, rax                        // low halves from byte 160, high halves from 576, 256 bytes each
    lea rdi, [rbp + 0x1000 + 160]
    mov ecx, 32
    2:
    imul rax, rbx
    inc rax
    mov [rdi], rax
    mov rdx, rax
    not rdx
    mov [rdi + 416], rdx
    add rdi, 8
    dec ecx
    jnz 2b
    mov word ptr [rbp + 0x1000], 0x37f
    mov dword ptr [rbp + 0x1000 + 24], 0x7f80
    mov qword ptr [rbp + 0x1000 + 512], 7
    mov eax, 7
    xor edx, edx
    xrstor64 [rbp + 0x1000]
    fninit
    fldpi
    fld1
    mov eax, 0x1110
    mov dr0, rax
    mov eax, 0x2220
    mov dr1, rax
    mov eax, 0x3330
    mov dr2, rax
    mov eax, 0x4440
    mov dr3, rax
    interop_wrmsr 0xc0000081, 0x0013000800000000
    interop_wrmsr 0xc0000082, 0xffff800000123456
    interop_wrmsr 0xc0000084, 0x0000000000047700
    interop_wrmsr 0xc0000100, 0x0000123400005000
    interop_wrmsr 0xc0000101, 0x0000123400006000
    interop_wrmsr 0xc0000102, 0xffff900000007000
    interop_wrmsr 0x174, 0x0000000000000010
    interop_wrmsr 0x277, 0x0007010600070106
    3:
    mov eax, 7
    xor edx, edx
    xsave64 [rbp + 0x3000]
    xor ecx, ecx
    4:
    mov rax, [rbp + 0x1000 + 160 + rcx * 8]
    cmp rax, [rbp + 0x3000 + 160 + rcx * 8]
    mov al, 0xe3
    jne 9f
    mov rax, [rbp + 0x1000 + 576 + rcx * 8]
    cmp rax, [rbp + 0x3000 + 576 + rcx * 8]
    mov al, 0xe3
    jne 9f
    inc ecx
    cmp ecx, 32
    jne 4b
    cmp dword ptr [rbp + 0x3000 + 24], 0x7f80
    mov al, 0xe4
    jne 9f
    fst qword ptr [rbp + 0x1808]
    fxch
    fst qword ptr [rbp + 0x1810]
    fxch
    mov rbx, 0x3ff0000000000000
    cmp [rbp + 0x1808], rbx
    mov al, 0xe5
    jne 9f
    mov rbx, 0x400921fb54442d18
    cmp [rbp + 0x1810], rbx
    mov al, 0xe5
    jne 9f
    interop_check_debug 0, 0x1110
    interop_check_debug 1, 0x2220
    interop_check_debug 2, 0x3330
    interop_check_debug 3, 0x4440
    interop_check_msr 0xc0000081, 0x0013000800000000
    interop_check_msr 0xc0000082, 0xffff800000123456
    interop_check_msr 0xc0000084, 0x0000000000047700
    interop_check_msr 0xc0000100, 0x0000123400005000
    interop_check_msr 0xc0000101, 0x0000123400006000
    interop_check_msr 0xc0000102, 0xffff900000007000
    interop_check_msr 0x174, 0x0000000000000010
    interop_check_msr 0x277, 0x0007010600070106
    inc qword ptr [rbp + 40]
    jmp 3b
    9:
    out 0xf4, al
    jmp 9b
    interop_registers_end:

    .popsection
    "#
);
