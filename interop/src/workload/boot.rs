//! A boot sector that sweeps RAM in flat 32-bit mode. It checks each page against its last pass.
//!
//! In pass n, every page gets n × `FACTOR` ^ its address at three places. Pass n + 1 compares them before it
//! writes. A lost, stale or repeated page is therefore detected immediately. At the end of a pass, the guest
//! may print a line. It does so if bit 26 or a higher bit of the time-stamp counter has changed.
//!
//! It runs at full speed until [`PACE_ADDRESS`] is set from outside. Then it writes a page every so many
//! ticks. It stores the longest time between two pages at [`LONGEST_GAP_ADDRESS`]; this is the pause that a
//! guest sees. It counts all such times by length at [`GAPS_ADDRESS`]. All these words are in a page that it
//! then writes with each step, so that they move with the guest.

use std::arch::global_asm;
use std::path::Path;

use super::sweep::{FACTOR, FIRST, Sweep};
use crate::Failure;

/// Size of the image, padded to a size that every disk controller accepts.
const IMAGE_BYTES: usize = 1 << 20;

// Address of the sector in memory, and offsets of the data after its code.
const LOADED: usize = 0x7c00;
const PROTECTED: usize = 0x20;
const TEXT_TICK: usize = 0x180;
const TEXT_OK: usize = 0x188;
const TEXT_BAD: usize = 0x198;
const TABLE: usize = 0x1b0;
const TABLE_POINTER: usize = 0x1c8;
const SWEPT_FROM: usize = 0x1d0;
const SWEPT_PAGES: usize = 0x1d4;
const LAST_LINE: usize = 0x1d8;
const IS_BAD: usize = 0x1dc;
const PACE: usize = 0x1e0;
const LAST_STEP: usize = 0x1e4;
const LONGEST_GAP: usize = 0x1e8;
const STEP_BYTES: usize = 0x1ec;
const SWEPT_END: usize = 0x1f0;
const SWEPT_BYTES: usize = 0x1f4;
const MOST_LATE: usize = 0x1f8;
const SAYS: usize = 0x1fc;
/// Offset after the sector, in the same page.
const GAPS_AT: usize = 0x200;

/// Physical address of a little-endian 32-bit word: ticks of the time-stamp counter from page to page. 0:
/// full speed, and no gap is stored.
pub const PACE_ADDRESS: u64 = (LOADED + PACE) as u64;
/// Physical address of a little-endian 32-bit word: the longest time between two pages since it was last set
/// to 0. In ticks of the time-stamp counter; valid below 2³² ticks.
pub const LONGEST_GAP_ADDRESS: u64 = (LOADED + LONGEST_GAP) as u64;

/// Physical address of a little-endian 32-bit word: the time-stamp counter at the last page, if a pace is
/// set.
pub const LAST_STEP_ADDRESS: u64 = (LOADED + LAST_STEP) as u64;

/// Physical address of a little-endian 32-bit word: limit of a page's lateness, in ticks. After a page within
/// the limit, the next one is due relative to its actual time. A later page counts as late by the limit, so
/// that the guest catches up. Initially there is no limit.
pub const MOST_LATE_ADDRESS: u64 = (LOADED + MOST_LATE) as u64;

/// Physical address of a byte: if not 0, the guest prints a dot with each page, if a pace is set.
pub const SAYS_ADDRESS: u64 = (LOADED + SAYS) as u64;

/// Physical address of [`GAPS`] little-endian 32-bit words: numbers of times between two pages, by length
/// ([`gap_ticks`]), if a pace is set. Their sum is the number of pages. A reader must first set them to 0.
pub const GAPS_ADDRESS: u64 = (LOADED + GAPS_AT) as u64;
/// Number of different lengths: four for each doubling.
pub const GAPS: usize = 124;

/// The shortest time that the word `index` counts, in ticks of the time-stamp counter.
pub fn gap_ticks(index: usize) -> u64 {
    ((4 + index % 4) as u64) << (index / 4).saturating_sub(1)
}

/// Flat descriptors: none, code, data.
const DESCRIPTORS: [u64; 3] = [0, 0x00cf_9a00_0000_ffff, 0x00cf_9200_0000_ffff];

/// Arguments for a machine that boots the sector.
pub(super) fn arguments(machine: &str, sweep: Sweep, directory: &Path) -> Result<Vec<String>, Failure> {
    let path = directory.join("boot.img");
    disk(&path, sweep)?;
    let device = if machine.starts_with("microvm") { "virtio-blk-device" } else { "ide-hd" };
    Ok(vec![
        "-drive".into(),
        format!("file={},format=raw,if=none,id=boot", path.display()),
        "-device".into(),
        format!("{device},drive=boot,bootindex=0"),
    ])
}

/// Writes the boot disk.
pub(super) fn disk(path: &Path, sweep: Sweep) -> Result<(), Failure> {
    let mut image = vec![0; IMAGE_BYTES];
    image[..512].copy_from_slice(&sector(sweep));
    std::fs::write(path, image).map_err(|error| format!("{}: {error}", path.display()))
}

/// The boot sector for this sweep.
fn sector(sweep: Sweep) -> [u8; 512] {
    let mut sector = [0; 512];
    let code = code();
    assert!(code.len() <= TEXT_TICK, "the boot sector's code was built too long");
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, code);
    put(TEXT_TICK, b"tick \0");
    put(TEXT_OK, b" checksum OK\n\0");
    put(TEXT_BAD, b" checksum BAD\n\0");
    put(TABLE, &DESCRIPTORS.map(u64::to_le_bytes).concat());
    put(TABLE_POINTER, &(size_of_val(&DESCRIPTORS) as u16 - 1).to_le_bytes());
    put(TABLE_POINTER + 2, &((LOADED + TABLE) as u32).to_le_bytes());
    put(SWEPT_FROM, &(FIRST as u32).to_le_bytes());
    put(SWEPT_PAGES, &sweep.pages().to_le_bytes());
    put(STEP_BYTES, &sweep.step_bytes().to_le_bytes());
    put(SWEPT_END, &(sweep.end() as u32).to_le_bytes());
    put(SWEPT_BYTES, &sweep.bytes().to_le_bytes());
    put(MOST_LATE, &u32::MAX.to_le_bytes());
    put(510, &[0x55, 0xaa]);
    sector
}

fn code() -> &'static [u8] {
    unsafe extern "C" {
        static sterna_sweep_begin: u8;
        static sterna_sweep_end: u8;
    }
    let (begin, end) = (&raw const sterna_sweep_begin, &raw const sterna_sweep_end);
    // SAFETY: both labels are in the block below, in this order, in one section. The section is mapped
    // readable for the program's whole life and is never written.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from_unsigned(begin)) }
}

// Registers: ebp is the pass, ebx the number of lines so far.
global_asm!(
    ".pushsection .rodata.sterna_sweep, \"a\", @progbits",
    ".globl sterna_sweep_begin",
    ".globl sterna_sweep_end",
    ".code16",
    "sterna_sweep_begin:",
    "    cli",
    "    xor     ax, ax",
    "    mov     ds, ax",
    "    .byte   0x0f, 0x01, 0x16", // lgdt [word]
    "    .word   {LOADED} + {TABLE_POINTER}",
    "    in      al, 0x92", // A20
    "    or      al, 2",
    "    out     0x92, al",
    "    mov     eax, cr0",
    "    or      al, 1",
    "    mov     cr0, eax",
    "    .byte   0xea", // jmp far
    "    .word   {LOADED} + {PROTECTED}, 8",
    "    .org    sterna_sweep_begin + {PROTECTED}",
    ".code32",
    "    mov     eax, 16",
    "    mov     ds, eax",
    "    mov     es, eax",
    "    mov     ss, eax",
    "    mov     esp, {LOADED}",
    "    xor     ebp, ebp",
    "    xor     ebx, ebx",
    ".Lsweep_pass:",
    "    mov     edi, dword ptr [{LOADED} + {SWEPT_FROM}]",
    "    mov     ecx, dword ptr [{LOADED} + {SWEPT_PAGES}]",
    "    imul    eax, ebp, {FACTOR}",
    "    inc     ebp",
    "    imul    edx, ebp, {FACTOR}",
    ".Lsweep_page:",
    "    cmp     dword ptr [{LOADED} + {PACE}], 0",
    "    je      .Lsweep_due",
    "    push    eax",
    "    push    edx",
    ".Lsweep_early:",
    "    rdtsc",
    "    sub     eax, dword ptr [{LOADED} + {LAST_STEP}]",
    "    cmp     eax, dword ptr [{LOADED} + {PACE}]",
    "    jb      .Lsweep_early",
    "    cmp     eax, dword ptr [{LOADED} + {LONGEST_GAP}]",
    "    jbe     .Lsweep_no_gap",
    "    mov     dword ptr [{LOADED} + {LONGEST_GAP}], eax",
    ".Lsweep_no_gap:",
    // The index is the position of the highest bit, followed by the two bits below it.
    "    push    ecx",
    "    bsr     ecx, eax",
    "    sub     ecx, 2",
    "    mov     edx, eax",
    "    shr     edx, cl",
    "    lea     edx, [edx + ecx * 4]",
    "    inc     dword ptr [{LOADED} + {GAPS_AT} + edx * 4]",
    "    pop     ecx",
    "    cmp     eax, dword ptr [{LOADED} + {MOST_LATE}]",
    "    jbe     .Lsweep_in_time",
    "    mov     eax, dword ptr [{LOADED} + {MOST_LATE}]",
    ".Lsweep_in_time:",
    "    add     dword ptr [{LOADED} + {LAST_STEP}], eax",
    "    cmp     byte ptr [{LOADED} + {SAYS}], 0",
    "    je      .Lsweep_silent",
    "    mov     al, 46",
    "    call    .Lsweep_character",
    ".Lsweep_silent:",
    "    pop     edx",
    "    pop     eax",
    ".Lsweep_due:",
    "    cmp     ebp, 1", // nothing was written before the first pass
    "    je      .Lsweep_write",
    "    xor     eax, edi",
    "    cmp     dword ptr [edi], eax",
    "    jne     .Lsweep_bad",
    "    cmp     dword ptr [edi + 2044], eax",
    "    jne     .Lsweep_bad",
    "    cmp     dword ptr [edi + 4092], eax",
    "    je      .Lsweep_good",
    ".Lsweep_bad:",
    "    inc     dword ptr [{LOADED} + {IS_BAD}]", // shorter than a move
    ".Lsweep_good:",
    "    xor     eax, edi",
    ".Lsweep_write:",
    "    xor     edx, edi",
    "    mov     dword ptr [edi], edx",
    "    mov     dword ptr [edi + 2044], edx",
    "    mov     dword ptr [edi + 4092], edx",
    "    xor     edx, edi",
    "    add     edi, dword ptr [{LOADED} + {STEP_BYTES}]",
    "    cmp     edi, dword ptr [{LOADED} + {SWEPT_END}]",
    "    jb      .Lsweep_next",
    "    sub     edi, dword ptr [{LOADED} + {SWEPT_BYTES}]",
    ".Lsweep_next:",
    "    dec     ecx",
    "    jnz     .Lsweep_page",
    // Prints a line from time to time.
    "    rdtsc",
    "    shrd    eax, edx, 26",
    "    cmp     eax, dword ptr [{LOADED} + {LAST_LINE}]",
    "    je      .Lsweep_pass",
    "    mov     dword ptr [{LOADED} + {LAST_LINE}], eax",
    "    mov     esi, {LOADED} + {TEXT_TICK}",
    "    call    .Lsweep_text",
    "    inc     ebx",
    "    mov     eax, ebx",
    "    xor     ecx, ecx",
    "    mov     edi, 10",
    ".Lsweep_digit:",
    "    xor     edx, edx",
    "    div     edi",
    "    add     edx, 48",
    "    push    edx",
    "    inc     ecx",
    "    test    eax, eax",
    "    jnz     .Lsweep_digit",
    ".Lsweep_digits_out:",
    "    pop     eax",
    "    call    .Lsweep_character",
    "    dec     ecx",
    "    jnz     .Lsweep_digits_out",
    "    mov     esi, {LOADED} + {TEXT_OK}",
    "    cmp     dword ptr [{LOADED} + {IS_BAD}], 0",
    "    je      .Lsweep_verdict",
    "    mov     esi, {LOADED} + {TEXT_BAD}",
    ".Lsweep_verdict:",
    "    call    .Lsweep_text",
    "    jmp     .Lsweep_pass",
    // Prints the text at esi.
    ".Lsweep_text:",
    "    movzx   eax, byte ptr [esi]",
    "    inc     esi",
    "    test    eax, eax",
    "    jz      .Lsweep_text_end",
    "    call    .Lsweep_character",
    "    jmp     .Lsweep_text",
    ".Lsweep_text_end:",
    "    ret",
    // Prints al when the port is ready.
    ".Lsweep_character:",
    "    push    eax",
    "    mov     edx, 0x3fd",
    ".Lsweep_wait:",
    "    in      al, dx",
    "    test    al, 0x20",
    "    jz      .Lsweep_wait",
    "    pop     eax",
    "    mov     dl, 0xf8",
    "    out     dx, al",
    "    ret",
    "sterna_sweep_end:",
    ".code64",
    ".popsection",
    LOADED = const LOADED,
    PROTECTED = const PROTECTED,
    TEXT_TICK = const TEXT_TICK,
    TEXT_OK = const TEXT_OK,
    TEXT_BAD = const TEXT_BAD,
    TABLE_POINTER = const TABLE_POINTER,
    SWEPT_FROM = const SWEPT_FROM,
    SWEPT_PAGES = const SWEPT_PAGES,
    LAST_LINE = const LAST_LINE,
    IS_BAD = const IS_BAD,
    PACE = const PACE,
    LAST_STEP = const LAST_STEP,
    LONGEST_GAP = const LONGEST_GAP,
    STEP_BYTES = const STEP_BYTES,
    SWEPT_END = const SWEPT_END,
    SWEPT_BYTES = const SWEPT_BYTES,
    MOST_LATE = const MOST_LATE,
    SAYS = const SAYS,
    GAPS_AT = const GAPS_AT,
    FACTOR = const FACTOR as i32,
);

#[cfg(test)]
mod tests {
    use super::*;

    /// The same computation as in the code.
    fn index_of(ticks: u32) -> usize {
        let shift = ticks.ilog2() - 2;
        ((ticks >> shift) + shift * 4) as usize
    }

    #[test]
    fn code_fits_and_each_length_is_counted_in_its_place() {
        let sector = sector(Sweep::in_order(64));
        assert_eq!(sector[510..], [0x55, 0xaa]);
        for index in 4..GAPS {
            let least = u32::try_from(gap_ticks(index)).unwrap();
            assert_eq!(index_of(least), index);
            assert!(index == 4 || index_of(least - 1) == index - 1, "{index}");
        }
        assert_eq!(index_of(u32::MAX), GAPS - 1);
        assert!(GAPS_ADDRESS as usize + GAPS * 4 <= 0x8000);
    }
}
