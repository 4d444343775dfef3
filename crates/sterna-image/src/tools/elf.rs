//! The head of an ELF core file of a guest's physical memory.
//!
//! It has the format of QEMU's own `dump-guest-memory`, which gdb and `crash` read. The file starts with a note
//! segment. Then follows one loadable segment for each range of physical memory, with `p_paddr` set.
//!
//! The notes are one `CORE` register set for each processor, then one `QEMU` note for each processor with the segment
//! and control registers. `crash` uses these registers to find the page tables and the address of a relocated kernel.
//!
//! Unlike in QEMU's files, segments start at multiples of the page size, so that file systems can share blocks. The
//! file is sparse.
//!
//! Sterna has no registers of processors other than x86. Their note segment is empty.

use super::architecture::Architecture;
use super::registers::{Registers, Segment};

const CORE: u16 = 4;
const I386: u16 = 3;
const LOAD: u32 = 1;
const NOTE: u32 = 4;
const HEADER_BYTES: usize = 64;
const PROGRAM_BYTES: usize = 56;
/// The count of program headers that refers to the section header (for 65535 or more).
const MANY: usize = 0xffff;
const SECTION_BYTES: usize = 64;

/// A loadable segment of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Virtual address; equal to the physical one if page tables were not followed.
    pub virtual_address: u64,
    /// First guest physical address of the segment.
    pub physical_address: u64,
    /// Length of the segment in bytes.
    pub length_bytes: u64,
    /// Offset of the segment's bytes after the head, in bytes.
    pub data_offset: u64,
}

/// The head: everything before the first segment's bytes, padded to a whole number of pages.
///
/// The loads' offsets are relative to its length. `processors` are x86 processors; the slice is empty for other
/// architectures.
pub fn head(architecture: Architecture, loads: &[Load], processors: &[Registers]) -> Vec<u8> {
    let is_long = processors.is_empty() || processors.iter().any(Registers::is_long_mode);
    let machine = if is_long { architecture.elf_machine() } else { I386 };
    let notes = notes(processors, is_long);
    let programs = loads.len() + 1;
    let sections = if programs >= MANY { 1 } else { 0 };
    let notes_at = HEADER_BYTES + sections * SECTION_BYTES + programs * PROGRAM_BYTES;
    let data_at = (notes_at + notes.len()).next_multiple_of(sterna_wire::PAGE_SIZE);

    let is_big = architecture.is_big_endian();
    let mut out = Numbers { bytes: Vec::with_capacity(data_at), is_big };
    out.bytes.extend([0x7f, b'E', b'L', b'F', 2, if is_big { 2 } else { 1 }, 1, 0]);
    out.bytes.extend([0; 8]);
    out.put16(&[CORE, machine]);
    out.put32(&[1]);
    let sections_at = if sections > 0 { HEADER_BYTES } else { 0 };
    out.put64(&[0, (HEADER_BYTES + sections * SECTION_BYTES) as u64, sections_at as u64]);
    out.put32(&[0]);
    let section_bytes = if sections > 0 { SECTION_BYTES as u16 } else { 0 };
    out.put16(&[HEADER_BYTES as u16, PROGRAM_BYTES as u16, programs.min(MANY) as u16]);
    out.put16(&[section_bytes, sections as u16, 0]);
    if sections > 0 {
        // The field `info` of the first section header contains the number of program headers.
        out.put32(&[0, 0]);
        out.put64(&[0, 0, 0, 0]);
        out.put32(&[0, programs as u32]);
        out.put64(&[0, 0]);
    }
    out.program(NOTE, notes_at as u64, 0, 0, notes.len() as u64);
    for load in loads {
        let offset = data_at as u64 + load.data_offset;
        out.program(LOAD, offset, load.virtual_address, load.physical_address, load.length_bytes);
    }
    let mut out = out.bytes;
    out.extend(notes);
    out.resize(data_at, 0);
    out
}

/// A buffer of integers in the guest's byte order.
struct Numbers {
    bytes: Vec<u8>,
    is_big: bool,
}

impl Numbers {
    fn put16(&mut self, values: &[u16]) {
        for value in values {
            self.bytes.extend(if self.is_big { value.to_be_bytes() } else { value.to_le_bytes() });
        }
    }

    fn put32(&mut self, values: &[u32]) {
        for value in values {
            self.bytes.extend(if self.is_big { value.to_be_bytes() } else { value.to_le_bytes() });
        }
    }

    fn put64(&mut self, values: &[u64]) {
        for value in values {
            self.bytes.extend(if self.is_big { value.to_be_bytes() } else { value.to_le_bytes() });
        }
    }

    fn program(&mut self, kind: u32, offset: u64, virtual_address: u64, physical: u64, bytes: u64) {
        self.put32(&[kind, if kind == LOAD { 7 } else { 0 }]);
        self.put64(&[offset, virtual_address, physical, bytes, bytes, 0]);
    }
}

/// The notes of x86 processors.
fn notes(processors: &[Registers], is_long: bool) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, registers) in processors.iter().enumerate() {
        let pid = index as u32 + 1;
        let status = if is_long { status_64(registers, pid) } else { status_32(registers, pid) };
        note(&mut out, "CORE", 1, &status);
    }
    for registers in processors {
        note(&mut out, "QEMU", 0, &qemu_state(registers));
    }
    out
}

fn note(out: &mut Vec<u8>, owner: &str, kind: u32, content: &[u8]) {
    put32(out, &[owner.len() as u32 + 1, content.len() as u32, kind]);
    out.extend(owner.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend(content);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Linux's `elf_prstatus` of x86-64, 336 bytes.
fn status_64(r: &Registers, pid: u32) -> Vec<u8> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = r.general;
    let [es, cs, ss, ds, fs, gs] = r.segments;
    let selector = |segment: Segment| u64::from(segment.selector);
    let mut out = vec![0; 112];
    out[32..36].copy_from_slice(&pid.to_le_bytes());
    put64(&mut out, &[r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi]);
    put64(&mut out, &[0, r.rip, selector(cs), r.rflags, rsp, selector(ss), fs.base, gs.base]);
    put64(&mut out, &[selector(ds), selector(es), selector(fs), selector(gs)]);
    out.resize(336, 0);
    out
}

/// Linux's `elf_prstatus` of i386, 144 bytes.
fn status_32(r: &Registers, pid: u32) -> Vec<u8> {
    let [eax, ecx, edx, ebx, esp, ebp, esi, edi, ..] = r.general.map(|register| register as u32);
    let [es, cs, ss, ds, fs, gs] = r.segments.map(|segment| segment.selector);
    let mut out = vec![0; 72];
    out[24..28].copy_from_slice(&pid.to_le_bytes());
    put32(&mut out, &[ebx, ecx, edx, esi, edi, ebp, eax, ds, es, fs, gs, 0]);
    put32(&mut out, &[r.rip as u32, cs, r.rflags as u32, esp, ss]);
    out.resize(144, 0);
    out
}

/// QEMU's own note with the state of one processor, 440 bytes.
fn qemu_state(r: &Registers) -> Vec<u8> {
    const BYTES: u32 = 440;
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, high @ ..] = r.general;
    let [es, cs, ss, ds, fs, gs] = r.segments;
    let mut out = Vec::with_capacity(BYTES as usize);
    put32(&mut out, &[1, BYTES]);
    put64(&mut out, &[rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp]);
    put64(&mut out, &high);
    put64(&mut out, &[r.rip, r.rflags]);
    for segment in [cs, ds, es, fs, gs, ss, r.ldt, r.tr, r.gdt, r.idt] {
        put32(&mut out, &[segment.selector, segment.limit, segment.flags, 0]);
        put64(&mut out, &[segment.base]);
    }
    put64(&mut out, &r.control);
    put64(&mut out, &[r.kernel_gs_base]);
    out
}

fn put32(out: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| out.extend(value.to_le_bytes()));
}

fn put64(out: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| out.extend(value.to_le_bytes()));
}
