//! Reads a processor's registers from QEMU's `cpu` section, by the field names in its description.
//!
//! The code assumes nothing about the section's layout: the description gives the place of each register's field. If
//! a field is missing, the whole processor has no registers here.

use super::description::Described;

/// A segment register with the cached content of its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Selector as the guest loaded it.
    pub selector: u32,
    /// Linear address of the segment's first byte.
    pub base: u64,
    /// Offset of the segment's last byte.
    pub limit: u32,
    /// Type and access rights, as in bits 32 to 63 of a descriptor.
    pub flags: u32,
}

/// The registers of one x86 processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Registers {
    /// rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15 (the instruction set's order).
    pub general: [u64; 16],
    /// Instruction pointer (rip, eip).
    pub rip: u64,
    /// Flags register (rflags, eflags).
    pub rflags: u64,
    /// es, cs, ss, ds, fs, gs (the instruction set's order).
    pub segments: [Segment; 6],
    /// Local descriptor table register.
    pub ldt: Segment,
    /// Task register with the current task's segment.
    pub tr: Segment,
    /// Global descriptor table register.
    pub gdt: Segment,
    /// Interrupt descriptor table register.
    pub idt: Segment,
    /// Control registers cr0 to cr4; cr1 is 0.
    pub control: [u64; 5],
    /// Extended feature enable register (EFER).
    pub efer: u64,
    /// The base that SWAPGS exchanges with the base of gs.
    pub kernel_gs_base: u64,
}

impl Registers {
    /// Reads the registers from `body`, a `cpu` section with the description `described`.
    ///
    /// `None` if a field is missing, except `kernel_gs_base`, which is 0 then.
    pub fn find(described: &Described, body: &[u8]) -> Option<Self> {
        let find = Finder { described, body };
        let mut registers = Self {
            rip: find.number("env.eip")?,
            rflags: find.number("env.eflags")?,
            efer: find.number("env.efer")?,
            kernel_gs_base: find.number("env.kernelgsbase").unwrap_or(0),
            ldt: find.segment("env.ldt", 0)?,
            tr: find.segment("env.tr", 0)?,
            gdt: find.segment("env.gdt", 0)?,
            idt: find.segment("env.idt", 0)?,
            ..Self::default()
        };
        for (index, general) in registers.general.iter_mut().enumerate() {
            *general = find.element("env.regs", index as u64)?;
        }
        for (index, segment) in registers.segments.iter_mut().enumerate() {
            *segment = find.segment("env.segs", index as u64)?;
        }
        for index in [0, 2, 3, 4] {
            registers.control[index] = find.number(&format!("env.cr[{index}]"))?;
        }
        Some(registers)
    }

    /// Whether the processor runs in long mode (64-bit, or its compatibility mode).
    pub fn is_long_mode(&self) -> bool {
        self.efer & 1 << 10 != 0
    }
}

struct Finder<'a> {
    described: &'a Described,
    body: &'a [u8],
}

impl Finder<'_> {
    fn number(&self, name: &str) -> Option<u64> {
        let (place, count) = self.described.field(name)?;
        (count == 1).then(|| self.bytes(place.offset, place.bytes)).flatten()
    }

    fn element(&self, name: &str, index: u64) -> Option<u64> {
        let (place, count) = self.described.field(name)?;
        let size = place.bytes.checked_div(count)?;
        (index < count).then(|| self.bytes(place.offset + index * size, size)).flatten()
    }

    fn segment(&self, name: &str, index: u64) -> Option<Segment> {
        let number = |inner| {
            let place = self.described.nested(name, index, inner)?;
            self.bytes(place.offset, place.bytes)
        };
        Some(Segment {
            selector: number("selector")? as u32,
            base: number("base")?,
            limit: number("limit")? as u32,
            flags: number("flags")? as u32,
        })
    }

    /// Reads a big-endian integer of 1 to 8 bytes.
    fn bytes(&self, offset: u64, count: u64) -> Option<u64> {
        let start = usize::try_from(offset).ok()?;
        let count = usize::try_from(count).ok().filter(|count| (1..=8).contains(count))?;
        let bytes = self.body.get(start..start.checked_add(count)?)?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}
