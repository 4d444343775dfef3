//! The architecture of a machine, for a core file: ELF's machine number and byte order.
//!
//! An image does not name its processors. Three sources may identify them, in this order: the user, the registers of
//! an x86 processor in the devices, and the machine type. Machine types have QEMU's names, with or without a version.
//!
//! Boards of several architectures have the name `virt`, and most of them have versions. Only the name of Arm's RAM
//! block identifies that board. No source tells whether an Arm guest has 32 or 64 bits.

use std::fmt;
use std::str::FromStr;

use crate::model::BlockShape;

/// Processor architectures that a core file can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// x86-64, or i386 if no processor is in long mode.
    X86,
    /// 64-bit Arm; ELF machine 183.
    Aarch64,
    /// 64-bit PowerPC, big-endian; ELF machine 21.
    Ppc64,
    /// 64-bit PowerPC, little-endian; ELF machine 21.
    Ppc64Le,
    /// z/Architecture; ELF machine 22.
    S390x,
    /// 64-bit RISC-V; ELF machine 243.
    Riscv64,
}

/// The reason why the architecture is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unknown {
    /// The machine type does not identify the architecture.
    Machine,
    /// PowerPC with an unknown byte order: the guest selects it at run time.
    ByteOrder,
}

/// Machine types that have only one architecture.
const MACHINES: [(&str, Architecture); 8] = [
    ("pc", Architecture::X86),
    ("q35", Architecture::X86),
    ("isapc", Architecture::X86),
    ("microvm", Architecture::X86),
    ("xenfv", Architecture::X86),
    ("sbsa-ref", Architecture::Aarch64),
    ("s390-ccw-virtio", Architecture::S390x),
    ("sterna", Architecture::X86),
];
/// Machine types with PowerPC processors.
const POWER: [&str; 2] = ["pseries", "powernv"];
/// The board name that several architectures use, and the name of Arm's RAM block.
const VIRT: &str = "virt";
const ARM_VIRT_RAM: &str = "mach-virt.ram";

/// Properties of an image that identify its architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signs<'a> {
    /// Machine type from the configuration.
    pub machine_type: &'a str,
    /// RAM blocks of the machine.
    pub blocks: &'a [BlockShape],
    /// Whether the devices contain the registers of an x86 processor.
    pub has_x86_registers: bool,
}

/// Whether a machine type is `name`, with or without a version.
fn is(machine_type: &str, name: &str) -> bool {
    machine_type.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

impl Architecture {
    const ALL: [Self; 6] = [Self::X86, Self::Aarch64, Self::Ppc64, Self::Ppc64Le, Self::S390x, Self::Riscv64];

    /// The name that the command line accepts.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86-64",
            Self::Aarch64 => "aarch64",
            Self::Ppc64 => "ppc64",
            Self::Ppc64Le => "ppc64le",
            Self::S390x => "s390x",
            Self::Riscv64 => "riscv64",
        }
    }

    /// ELF's machine number. For x86, it is the number of x86-64.
    ///
    /// The core of a machine without a processor in long mode has the number of i386 instead.
    pub fn elf_machine(self) -> u16 {
        match self {
            Self::X86 => 62,
            Self::Aarch64 => 183,
            Self::Ppc64 | Self::Ppc64Le => 21,
            Self::S390x => 22,
            Self::Riscv64 => 243,
        }
    }

    /// Whether integers have the highest byte first.
    pub fn is_big_endian(self) -> bool {
        matches!(self, Self::Ppc64 | Self::S390x)
    }

    /// Physical address of RAM for this machine type, by QEMU's documentation of its boards.
    ///
    /// `None` if the address is not known: on Arm and RISC-V it differs from board to board.
    pub fn ram_base(self, machine_type: &str) -> Option<u64> {
        match self {
            Self::Aarch64 => is(machine_type, VIRT).then_some(1 << 30),
            Self::Riscv64 => is(machine_type, VIRT).then_some(2 << 30),
            _ => Some(0),
        }
    }

    /// Determines the architecture of a machine.
    ///
    /// # Errors
    /// [`Unknown`] if the signs do not identify the architecture.
    pub fn of(signs: &Signs<'_>) -> Result<Self, Unknown> {
        let machine = signs.machine_type;
        if signs.has_x86_registers {
            return Ok(Self::X86);
        }
        if POWER.iter().any(|name| machine.starts_with(name)) {
            return Err(Unknown::ByteOrder);
        }
        if is(machine, VIRT) && signs.blocks.iter().any(|block| block.name == ARM_VIRT_RAM) {
            return Ok(Self::Aarch64);
        }
        let found = MACHINES.iter().find(|(name, _)| is(machine, name));
        found.map(|(_, architecture)| *architecture).ok_or(Unknown::Machine)
    }

    /// The names of all architectures, separated by commas.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|architecture| architecture.name() == text);
        found.ok_or_else(|| format!("{text:?} is not a known architecture; known are {}", Self::names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(machine_type: &str, block: &str, has_x86_registers: bool) -> Result<Architecture, Unknown> {
        let name = block.to_owned();
        let block =
            BlockShape { name, length_bytes: 4096, address: None, host_page_bytes: None, is_skipped: false };
        Architecture::of(&Signs { machine_type, blocks: &[block], has_x86_registers })
    }

    #[test]
    fn of_a_machine_type_is_that_of_its_board() {
        for (machine, block, found) in [
            ("pc-i440fx-11.1", "pc.ram", Ok(Architecture::X86)),
            ("pc-q35-7.2", "pc.ram", Ok(Architecture::X86)),
            ("isapc", "pc.ram", Ok(Architecture::X86)),
            ("virt-10.0", "mach-virt.ram", Ok(Architecture::Aarch64)),
            ("sbsa-ref", "sbsa-ref.ram", Ok(Architecture::Aarch64)),
            ("s390-ccw-virtio-10.0", "s390.ram", Ok(Architecture::S390x)),
            ("pseries-10.0", "ppc_spapr.ram", Err(Unknown::ByteOrder)),
            ("powernv10", "ram", Err(Unknown::ByteOrder)),
            // RAM blocks of the `virt` boards of m68k and RISC-V.
            ("virt-10.0", "m68k_virt.ram", Err(Unknown::Machine)),
            ("virt", "riscv_virt_board.ram", Err(Unknown::Machine)),
            ("none", "ram", Err(Unknown::Machine)),
            ("", "ram", Err(Unknown::Machine)),
        ] {
            assert_eq!(of(machine, block, false), found, "{machine}");
        }
        assert_eq!(of("none", "ram", true), Ok(Architecture::X86));
        for architecture in Architecture::ALL {
            assert_eq!(architecture.name().parse(), Ok(architecture));
        }
    }
}
