//! The machine code of the ledger guest, as bytes of this program.
#![allow(unsafe_code)]

use std::arch::global_asm;

use super::{CARD_ADDRESS, DISK_ADDRESS, ETHERTYPE, FACTOR, SECTORS_PER_SLOT, SLOTS, WRONG};

/// The flat 64-bit guest's code; position independent, entered at its first byte.
pub(super) fn flat() -> &'static [u8] {
    let (begin, end) = (&raw const sterna_ledger_begin, &raw const sterna_ledger_end);
    // SAFETY: both labels are in the block below, in this order, in one section. The section is mapped
    // readable for the program's whole life and is never written.
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
/// Header of a disk request, followed by its status.
const REQUEST: u64 = 0x20_9000;
const STATUS: u64 = REQUEST + 16;
const RECORD: u64 = 0x20_a000;
const READ_BACK: u64 = 0x20_b000;
/// The network card's header, followed by the packet.
const PACKET: u64 = 0x20_c000;
const PACKET_BYTES: u64 = 12 + 60;
/// For each place on the disk, number and digest of its record.
const KNOWN: u64 = 0x30_0000;
/// For each place on the disk, a page of memory.
///
/// It contains the record in one round over the places, and zeros in the next.
const PAGES: u64 = 0x40_0000;

// r12: the number. r13: the digest. r14: address of the record's place in KNOWN. r15: its first sector.
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
    // The card: a queue that never receives a packet, and one that sends.
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
    // The page of the record's place. In one round over the places the page must be zero and is filled; in
    // the next it must be filled and is zeroed. This check finds a page that was lost, or that kept its
    // content when it became zero.
    "    mov     rdi, r12",
    "    and     edi, {SLOTS} - 1",
    "    shl     edi, 12",
    "    add     rdi, {PAGES}",
    "    lea     rax, [r12 - {SLOTS}]",
    "    mov     rdx, r12",
    "    test    r12, {SLOTS}",
    "    jnz     .Lledger_page_has",
    "    xor     eax, eax",
    "    jmp     .Lledger_page_next",
    ".Lledger_page_has:",
    "    xor     edx, edx",
    ".Lledger_page_next:",
    "    mov     ecx, 64",
    ".Lledger_page_word:",
    "    cmp     [rdi], rax",
    "    jne     .Lledger_wrong",
    "    mov     [rdi], rdx",
    "    add     rdi, 64",
    "    dec     ecx",
    "    jnz     .Lledger_page_word",
    // The content on the disk must be the record that was written there last.
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
    // Write the record to the disk,
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
    // send it as a packet,
    "    mov     edx, {PACKET}",
    "    mov     [rdx + 26], r12",
    "    mov     [rdx + 34], r13",
    "    mov     ebx, {CARD}",
    "    mov     ecx, 1",
    "    mov     edx, {SEND_RING}",
    "    call    .Lledger_submit",
    // and print it as a line.
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
    // Initialises the device at rbx, with VIRTIO_F_VERSION_1 as its only feature.
    ".Lledger_begin:",
    "    mov     dword ptr [rbx + 0x70], 0",
    "    mov     dword ptr [rbx + 0x70], 3",
    "    mov     dword ptr [rbx + 0x24], 1",
    "    mov     dword ptr [rbx + 0x20], 1",
    "    mov     dword ptr [rbx + 0x24], 0",
    "    mov     dword ptr [rbx + 0x20], 0",
    "    mov     dword ptr [rbx + 0x70], 11",
    "    ret",
    // Sets up queue ecx of the device at rbx, with its rings at rdx.
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
    // Disables interrupts of the queue.
    "    mov     word ptr [rdx + 0x1000], 1",
    "    ret",
    // Performs request eax (0 reads, 1 writes) for the sector r15 with the buffer rsi.
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
    // Submits descriptor 0 to queue ecx of the device at rbx, whose rings are at rdx, and waits for its
    // completion.
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
    PAGES = const PAGES,
    SLOTS = const SLOTS,
    SECTORS = const SECTORS_PER_SLOT,
    FACTOR = const FACTOR,
    ETHERTYPE = const u16::from_le_bytes(ETHERTYPE),
    WRONG = const WRONG,
);
