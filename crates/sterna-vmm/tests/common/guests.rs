//! Test guests of a few instructions. Flat guests start with rdi = vCPU index, rsi = boot parameters.

use std::arch::global_asm;

/// The bytes between two labels.
macro_rules! blob {
    ($name:ident, $start:ident, $end:ident) => {
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

blob!(boot_sector, guest_boot_start, guest_boot_end);
blob!(counter, guest_counter_start, guest_counter_end);
blob!(port_loop, guest_port_start, guest_port_end);
blob!(exit_code, guest_exit_start, guest_exit_end);
blob!(triple_fault, guest_fault_start, guest_fault_end);
blob!(ram_probe, guest_probe_start, guest_probe_end);
blob!(halted, guest_halt_start, guest_halt_end);

/// Address of the counters of `counter`, one page per vCPU.
pub const COUNTERS: u64 = 0x20_0000;
/// Exit code of a guest that found wrong data.
pub const WRONG: u8 = 0xee;

global_asm!(
    r#"
    .pushsection .rodata.sterna_guests, "a"

    // Prints "boot sector" from real mode, then halts.
    guest_boot_start:
    .code16
    .byte 0xe8, 0x00, 0x00          // call next
    .byte 0x5e                      // pop si
    add si, 26
    mov dx, 0x3f8
    2:
    .byte 0xac                      // lodsb
    test al, al
    jz 3f
    out dx, al
    jmp 2b
    3:
    mov al, 7
    out 0xf4, al
    cli
    hlt
    .org guest_boot_start + 3 + 26
    .asciz "boot sector"
    guest_boot_end:
    .code64

    // Counts in a register and in memory; ends with 0xee if the two ever differ.
    guest_counter_start:
    shl rdi, 12
    add rdi, 0x200000
    xor eax, eax
    2:
    cmp [rdi], rax
    jne 3f
    inc rax
    mov [rdi], rax
    jmp 2b
    3:
    mov al, 0xee
    out 0xf4, al
    jmp 3b
    guest_counter_end:

    // Port 0x500 gives numbers in order, 0x504 wants them back; every 8th time a string of bytes out
    // (0x508) and one in (0x509), and a read of memory that no device answers.
    guest_port_start:
    xor ebx, ebx
    cld
    2:
    mov dx, 0x500
    in eax, dx
    cmp eax, ebx
    jne 9f
    mov dx, 0x504
    out dx, eax
    inc ebx
    test ebx, 7
    jnz 2b
    mov rdi, 0x200000
    mov [rdi], rbx
    mov rsi, rdi
    mov ecx, 8
    mov dx, 0x508
    rep outsb
    mov ecx, 5
    mov dx, 0x509
    mov rdi, 0x201000
    rep insb
    mov r8d, 0xd0000000
    mov eax, [r8]
    cmp eax, -1
    jne 9f
    mov [r8], ebx
    jmp 2b
    9:
    mov al, 0xee
    out 0xf4, al
    jmp 9b
    guest_port_end:

    // Ends with the code 3 plus its vCPU index.
    guest_exit_start:
    lea eax, [rdi + 3]
    out 0xf4, al
    hlt
    guest_exit_end:

    // Three faults at once: there is no IDT.
    guest_fault_start:
    ud2
    guest_fault_end:

    // Writes its own address into the last word of every RAM range and reads all of them back.
    guest_probe_start:
    mov rcx, [rsi + 32]
    lea rbx, [rsi + 40]
    2:
    mov rax, [rbx]
    add rax, [rbx + 8]
    sub rax, 8
    mov [rax], rax
    add rbx, 16
    loop 2b
    mov rcx, [rsi + 32]
    lea rbx, [rsi + 40]
    3:
    mov rax, [rbx]
    add rax, [rbx + 8]
    sub rax, 8
    cmp [rax], rax
    jne 9f
    add rbx, 16
    loop 3b
    mov al, 1
    out 0xf4, al
    9:
    mov al, 0xee
    out 0xf4, al
    hlt
    guest_probe_end:

    // Sleeps without end.
    guest_halt_start:
    cli
    hlt
    jmp guest_halt_start
    guest_halt_end:
    .popsection
    "#
);
