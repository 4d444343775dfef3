//! What processors a machine has, as far as a core file must say: the number that ELF has for them, and their byte order.
//!
//! An image does not name its processors. What tells them, the first that speaks: the user, the registers of an x86
//! processor in the devices, the machine type. Machine types are QEMU's names, with or without a version behind them.

use std::fmt;
use std::str::FromStr;

/// Processors that a core file can be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// x86-64, and i386 where no processor is in long mode.
    X86,
    /// 64-bit Arm.
    Aarch64,
    /// 64-bit PowerPC, big-endian.
    Ppc64,
    /// 64-bit PowerPC, little-endian.
    Ppc64Le,
    /// z/Architecture.
    S390x,
    /// 64-bit RISC-V.
    Riscv64,
}

/// Why the processors are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// The machine type says nothing.
    Machine,
    /// PowerPC in either byte order: the guest chooses it when it runs.
    ByteOrder,
}

/// Machine types of which each has one kind of processor.
const MACHINES: [(&str, Architecture); 9] = [
    ("pc", Architecture::X86),
    ("q35", Architecture::X86),
    ("isapc", Architecture::X86),
    ("microvm", Architecture::X86),
    ("xenfv", Architecture::X86),
    // Arm's has a version behind its name, RISC-V's has none.
    ("virt-", Architecture::Aarch64),
    ("sbsa-ref", Architecture::Aarch64),
    ("s390-ccw-virtio", Architecture::S390x),
    ("sterna", Architecture::X86),
];
/// Machine types with PowerPC processors.
const POWER: [&str; 2] = ["pseries", "powernv"];

impl Architecture {
    const ALL: [Self; 6] = [Self::X86, Self::Aarch64, Self::Ppc64, Self::Ppc64Le, Self::S390x, Self::Riscv64];

    /// The name, as the command line takes it.
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

    /// ELF's number for it, where no processor says that it is in an older mode.
    pub fn elf_machine(self) -> u16 {
        match self {
            Self::X86 => 62,
            Self::Aarch64 => 183,
            Self::Ppc64 | Self::Ppc64Le => 21,
            Self::S390x => 22,
            Self::Riscv64 => 243,
        }
    }

    /// Whether its numbers have the highest byte first.
    pub fn is_big_endian(self) -> bool {
        matches!(self, Self::Ppc64 | Self::S390x)
    }

    /// Where the machine's RAM begins in physical memory, by QEMU's documentation of its boards.
    pub fn ram_base(self) -> u64 {
        match self {
            Self::Aarch64 => 1 << 30,
            Self::Riscv64 => 2 << 30,
            _ => 0,
        }
    }

    /// The processors of a machine type; `has_x86_registers`: the devices hold those of x86.
    ///
    /// # Errors
    /// Nothing says what they are.
    pub fn of(machine_type: &str, has_x86_registers: bool) -> Result<Self, Unknown> {
        if has_x86_registers {
            return Ok(Self::X86);
        }
        let is = |name: &str| {
            let rest = machine_type.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-') || name.ends_with('-'))
        };
        if POWER.iter().any(|name| is(name) || machine_type.starts_with(name)) {
            return Err(Unknown::ByteOrder);
        }
        let found = MACHINES.iter().find(|(name, _)| is(name));
        found.map(|(_, architecture)| *architecture).ok_or(Unknown::Machine)
    }

    /// The names of all.
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
        found.ok_or_else(|| format!("{text:?} is no architecture that is known; there are {}", Self::names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_machine_type_is_that_of_its_board() {
        for (machine, found) in [
            ("pc-i440fx-11.1", Ok(Architecture::X86)),
            ("pc-q35-7.2", Ok(Architecture::X86)),
            ("isapc", Ok(Architecture::X86)),
            ("virt-10.0", Ok(Architecture::Aarch64)),
            ("s390-ccw-virtio-10.0", Ok(Architecture::S390x)),
            ("pseries-10.0", Err(Unknown::ByteOrder)),
            ("powernv10", Err(Unknown::ByteOrder)),
            ("virt", Err(Unknown::Machine)),
            ("none", Err(Unknown::Machine)),
            ("", Err(Unknown::Machine)),
        ] {
            assert_eq!(Architecture::of(machine, false), found, "{machine}");
        }
        assert_eq!(Architecture::of("none", true), Ok(Architecture::X86));
        for architecture in Architecture::ALL {
            assert_eq!(architecture.name().parse(), Ok(architecture));
        }
    }
}
