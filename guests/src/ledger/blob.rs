//! The guest's machine code, as bytes of this program.
#![allow(unsafe_code)]

use std::arch::global_asm;

use super::{CARD_ADDRESS, DISK_ADDRESS, ETHERTYPE, FACTOR, SECTORS_PER_SLOT, SLOTS, WRONG};

/// The flat 64-bit guest's code; position independent, entered at its first byte.
pub(super) fn flat() -> &'static [u8] {
    let (begin, end) = (&raw const sterna_ledger_begin, &raw const sterna_ledger_end);
    // SAFETY: both labels are in the block below, in this order, in one section that is mapped readable for the program's whole life and
    // that nobody writes.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from_unsigned(begin)) }
}

unsafe extern "C" {
    static sterna_ledger_begin: u8;
    static sterna_ledger_end: u8;
}

// Rings of three pages each: descriptors, available, used.
const DISK_RING: u64 = 0x20_0000;
const RECEIVE_RING: u64 = 0x20_3000;
const SEND_RING: u64 = 0x20_6000;
/// A disk request's header, its status behind it.
const REQUEST: u64 = 0x20_9000;
const STATUS: u64 = REQUEST + 16;
const RECORD: u64 = 0x20_a000;
const READ_BACK: u64 = 0x20_b000;
/// The card's header, and behind it the packet.
const PACKET: u64 = 0x20_c000;
const PACKET_BYTES: u64 = 12 + 60;
/// Of each place on the disk: number and digest of the record there.
const KNOWN: u64 = 0x30_0000;

// r12: the number. r13: the digest. r14: where KNOWN has the record's place. r15: its first sector.
global_asm!(
    ".pushsection .rodata.sterna_ledger, \"a\", @progbits",
    ".balign 16",
    ".globl sterna_ledger_begin",
    ".globl sterna_ledger_end",
    "sterna_ledger_begin:",
    "    test    rdi, rdi",
    "    jz      .Lledger_first",
    ".Lledger_idle:",
    "    hlt",
    "    jmp     .Lledger_idle",
    ".Lledger_first:",
    // The disk: three descriptors, one request at a time.
    "    mov     ebx, {DISK}",
    "    call    .Lledger_begin",
    "    xor     ecx, ecx",
    "    mov     edx, {DISK_RING}",
    "    call    .Lledger_queue",
    "    mov     dword ptr [rdx], {REQUEST}",
    "    mov     dword ptr [rdx + 8], 16",
    "    mov     dword ptr [rdx + 12], 0x10001",
    "    mov     dword ptr [rdx + 24], 512",
    "    mov     dword ptr [rdx + 32], {STATUS}",
    "    mov     dword ptr [rdx + 40], 1",
    "    mov     dword ptr [rdx + 44], 2",
    "    mov     dword ptr [rbx + 0x70], 15",
    // The card: a queue that receives nothing, and one that sends.
    "    mov     ebx, {CARD}",
    "    call    .Lledger_begin",
    "    xor     ecx, ecx",
    "    mov     edx, {RECEIVE_RING}",
    "    call    .Lledger_queue",
    "    inc     ecx",
    "    mov     edx, {SEND_RING}",
    "    call    .Lledger_queue",
    "    mov     dword ptr [rdx], {PACKET}",
    "    mov     dword ptr [rdx + 8], {PACKET_BYTES}",
    "    mov     dword ptr [rbx + 0x70], 15",
    "    mov     edx, {PACKET}",
    "    mov     dword ptr [rdx + 12], -1",
    "    mov     dword ptr [rdx + 16], 0x5452ffff",
    "    mov     dword ptr [rdx + 20], 0x0c0b0a00",
    "    mov     word ptr [rdx + 24], {ETHERTYPE}",
    "    xor     r12d, r12d",
    "    xor     r13d, r13d",
    ".Lledger_next:",
    "    inc     r12",
    "    movabs  rax, {FACTOR}",
    "    imul    r13, rax",
    "    add     r13, r12",
    "    mov     r14, r12",
    "    and     r14d, {SLOTS} - 1",
    "    imul    r15, r14, {SECTORS}",
    "    shl     r14d, 4",
    "    add     r14, {KNOWN}",
    // What stands there is what was written there last.
    "    xor     eax, eax",
    "    mov     esi, {READ_BACK}",
    "    call    .Lledger_request",
    "    mov     rax, [r14]",
    "    mov     rdx, [r14 + 8]",
    "    mov     ecx, 32",
    ".Lledger_compare:",
    "    cmp     [rsi], rax",
    "    jne     .Lledger_wrong",
    "    cmp     [rsi + 8], rdx",
    "    jne     .Lledger_wrong",
    "    add     rsi, 16",
    "    dec     ecx",
    "    jnz     .Lledger_compare",
    // The record: on the disk,
    "    mov     esi, {RECORD}",
    "    mov     ecx, 32",
    ".Lledger_fill:",
    "    mov     [rsi], r12",
    "    mov     [rsi + 8], r13",
    "    add     rsi, 16",
    "    dec     ecx",
    "    jnz     .Lledger_fill",
    "    mov     eax, 1",
    "    mov     esi, {RECORD}",
    "    call    .Lledger_request",
    "    mov     [r14], r12",
    "    mov     [r14 + 8], r13",
    // as a packet,
    "    mov     edx, {PACKET}",
    "    mov     [rdx + 26], r12",
    "    mov     [rdx + 34], r13",
    "    mov     ebx, {CARD}",
    "    mov     ecx, 1",
    "    mov     edx, {SEND_RING}",
    "    call    .Lledger_submit",
    // and as a line.
    "    mov     rsi, r12",
    "    mov     ecx, 16",
    "    mov     edx, 0x3f8",
    ".Lledger_digit:",
    "    rol     rsi, 4",
    "    mov     eax, esi",
    "    and     eax, 15",
    "    add     eax, 48",
    "    cmp     eax, 58",
    "    jb      .Lledger_print",
    "    add     eax, 39",
    ".Lledger_print:",
    "    out     dx, al",
    "    dec     ecx",
    "    jnz     .Lledger_digit",
    "    mov     al, 10",
    "    out     dx, al",
    "    jmp     .Lledger_next",
    ".Lledger_wrong:",
    "    mov     edx, 0x3f8",
    "    mov     al, 88",
    "    out     dx, al",
    "    mov     al, {WRONG}",
    "    out     0xf4, al",
    "    jmp     .Lledger_wrong",
    // The device at rbx begins: it gets VIRTIO_F_VERSION_1 and nothing else.
    ".Lledger_begin:",
    "    mov     dword ptr [rbx + 0x70], 0",
    "    mov     dword ptr [rbx + 0x70], 3",
    "    mov     dword ptr [rbx + 0x24], 1",
    "    mov     dword ptr [rbx + 0x20], 1",
    "    mov     dword ptr [rbx + 0x24], 0",
    "    mov     dword ptr [rbx + 0x20], 0",
    "    mov     dword ptr [rbx + 0x70], 11",
    "    ret",
    // Queue ecx of the device at rbx lies at rdx.
    ".Lledger_queue:",
    "    mov     dword ptr [rbx + 0x30], ecx",
    "    mov     dword ptr [rbx + 0x38], 8",
    "    mov     dword ptr [rbx + 0x80], edx",
    "    mov     dword ptr [rbx + 0x84], 0",
    "    lea     eax, [rdx + 0x1000]",
    "    mov     dword ptr [rbx + 0x90], eax",
    "    mov     dword ptr [rbx + 0x94], 0",
    "    lea     eax, [rdx + 0x2000]",
    "    mov     dword ptr [rbx + 0xa0], eax",
    "    mov     dword ptr [rbx + 0xa4], 0",
    "    mov     dword ptr [rbx + 0x44], 1",
    // No interrupts.
    "    mov     word ptr [rdx + 0x1000], 1",
    "    ret",
    // Request eax (0 reads, 1 writes) of the sector r15 at rsi.
    ".Lledger_request:",
    "    mov     edx, {REQUEST}",
    "    mov     dword ptr [rdx], eax",
    "    mov     [rdx + 8], r15",
    "    mov     byte ptr [rdx + 16], 255",
    "    mov     edx, {DISK_RING}",
    "    mov     [rdx + 16], rsi",
    "    xor     eax, 1",
    "    lea     eax, [rax + rax + 0x20001]",
    "    mov     dword ptr [rdx + 28], eax",
    "    mov     ebx, {DISK}",
    "    xor     ecx, ecx",
    "    call    .Lledger_submit",
    "    mov     edx, {STATUS}",
    "    cmp     byte ptr [rdx], 0",
    "    jne     .Lledger_wrong",
    "    ret",
    // Descriptor 0 goes into queue ecx of the device at rbx, which lies at rdx; waits until it comes back.
    ".Lledger_submit:",
    "    movzx   eax, word ptr [rdx + 0x1002]",
    "    inc     eax",
    "    mov     word ptr [rdx + 0x1002], ax",
    "    mov     dword ptr [rbx + 0x50], ecx",
    ".Lledger_wait:",
    "    pause",
    "    cmp     word ptr [rdx + 0x2002], ax",
    "    jne     .Lledger_wait",
    "    ret",
    "sterna_ledger_end:",
    ".popsection",
    DISK = const DISK_ADDRESS,
    CARD = const CARD_ADDRESS,
    DISK_RING = const DISK_RING,
    RECEIVE_RING = const RECEIVE_RING,
    SEND_RING = const SEND_RING,
    REQUEST = const REQUEST,
    STATUS = const STATUS,
    RECORD = const RECORD,
    READ_BACK = const READ_BACK,
    PACKET = const PACKET,
    PACKET_BYTES = const PACKET_BYTES,
    KNOWN = const KNOWN,
    SLOTS = const SLOTS,
    SECTORS = const SECTORS_PER_SLOT,
    FACTOR = const FACTOR,
    ETHERTYPE = const u16::from_le_bytes(ETHERTYPE),
    WRONG = const WRONG,
);
