//! The guest-physical memory map and the fixed ports and interrupts of a machine.
//!
//! | guest-physical | content |
//! | --- | --- |
//! | `0 ..` | RAM block `ram.low`, at most 3 GiB |
//! | 3 GiB .. 4 GiB | hole: virtio devices from 0xd0000000 on, IOAPIC at 0xfec00000, LAPIC at 0xfee00000 |
//! | 4 GiB .. | RAM block `ram.high`: the remaining RAM, if there is any |
//!
//! A flat 64-bit guest finds these parts of the first MiB in use. All of it is ordinary RAM that migrates:
//!
//! | address | content |
//! | --- | --- |
//! | [`GDT`] | null, 64-bit code (selector 0x08), data (0x10), a task-state descriptor (0x18) |
//! | [`BOOT_PARAMETERS`] | the boot-parameter page, see below |
//! | [`PAGE_TABLES`] | identity mapping of the first 4 GiB and of all RAM, in 2 MiB or 1 GiB pages |
//! | [`STACKS`] | 4 KiB of stack for each vCPU; vCPU i starts with `rsp = STACKS + (i + 1) * 4096` |
//! | [`FLAT_ENTRY`] | the guest's code: its first byte is the entry of every vCPU |
//!
//! Every vCPU starts at [`FLAT_ENTRY`] in long mode with interrupts off, SSE enabled (CR4.OSFXSR) and no IDT.
//! `rdi` is its index, `rsi` is [`BOOT_PARAMETERS`], and all other general registers are 0.
//!
//! The boot-parameter page holds little-endian 64-bit words:
//!
//! | offset | word |
//! | --- | --- |
//! | 0 | [`BOOT_MAGIC`] |
//! | 8 | layout version, 1 |
//! | 16 | number of vCPUs |
//! | 24 | TSC frequency, kHz |
//! | 32 | number n of RAM ranges, 1 to 4 |
//! | 40 | 4 × (start, length) of RAM that the guest may use freely; the first n are filled |
//! | 104 | number of parameters, at most [`PARAMETERS_MAX`] |
//! | 112 | the parameters of the configuration, for the guest to interpret |

/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;
/// Highest end of low RAM. The hole begins here.
pub const HOLE_START: u64 = 3 * GIB;
/// Start of high RAM, at 4 GiB.
pub const HIGH_START: u64 = 4 * GIB;
/// Smallest size of RAM: 64 MiB.
pub const RAM_MIN_BYTES: u64 = 64 << 20;
/// Name of the RAM block below the hole.
pub const LOW_BLOCK: &str = "ram.low";
/// Name of the RAM block above 4 GiB.
pub const HIGH_BLOCK: &str = "ram.high";

/// Address of the global descriptor table of flat guests.
pub const GDT: u64 = 0x1000;
/// Address of the boot-parameter page.
pub const BOOT_PARAMETERS: u64 = 0x7000;
/// Address at which boot sectors are loaded and started, as a PC's BIOS does.
pub const BOOT_SECTOR: u64 = 0x7c00;
/// Address of the page tables: PML4, then PDPT, then page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Address of vCPU 0's stack. Each vCPU has 4 KiB.
pub const STACKS: u64 = 0x8_0000;
/// Address of a Linux kernel's command line.
pub const COMMAND_LINE: u64 = 0x6_0000;
/// Highest length of the command line in bytes, without the NUL.
pub const COMMAND_LINE_MAX: usize = 0xffff;
/// Start address of a PC's processor: the firmware's entry in real mode.
pub(crate) const RESET_VECTOR: u64 = 0xf_fff0;
/// End of the RAM below 1 MiB that a Linux kernel may use.
pub(crate) const LOW_RAM_END: u64 = 0x9_fc00;
/// Load address and entry of flat guests: 1 MiB.
pub const FLAT_ENTRY: u64 = 0x10_0000;

/// First word of the boot-parameter page, the bytes `STRNBOOT`.
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"STRNBOOT");
/// Version of the boot-parameter page's layout.
pub const BOOT_VERSION: u64 = 1;
/// Offset of the first RAM range in the boot-parameter page.
pub const BOOT_RANGES: u64 = 40;
/// Offset of the parameters' count in the boot-parameter page.
pub const BOOT_PARAMETER_COUNT: u64 = 104;
/// Highest number of parameters in a configuration.
pub const PARAMETERS_MAX: usize = 64;

/// First port of the serial console, which has 8 ports.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt line of the serial console.
pub const SERIAL_IRQ: u32 = 4;
/// Exit port: a byte written here ends the guest with that byte as its code.
pub const EXIT_PORT: u16 = 0xf4;
/// Keyboard controller's port: [`KEYBOARD_RESET`] written here resets the machine.
pub const KEYBOARD_PORT: u16 = 0x64;
/// Value that resets the machine when written to [`KEYBOARD_PORT`].
pub const KEYBOARD_RESET: u8 = 0xfe;
/// Panic port, as QEMU's `pvpanic`: a kernel that panics writes bit 0.
pub const PANIC_PORT: u16 = 0x505;
/// ACPI's sleep control register. Bit 5 with [`SLEEP_TYPE_OFF`] in bits 2 to 4 switches the machine off.
pub const SLEEP_PORT: u16 = 0x600;
/// ACPI's sleep status register, which reads as 0.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// Sleep type of ACPI's state S5 (off).
pub const SLEEP_TYPE_OFF: u8 = 5;
/// Highest number of virtio devices. Each has its own interrupt.
pub const VIRTIO_MAX: usize = 8;
/// Distance between the registers of two virtio devices, in bytes.
pub(crate) const VIRTIO_BYTES: u64 = 0x1000;
/// Address of the first virtio device, in the hole.
const VIRTIO_START: u64 = 0xd000_0000;
/// Interrupt of the first virtio device, the first line that no PC device uses.
const VIRTIO_FIRST_INTERRUPT: u32 = 16;
/// Address of the vCPUs' interrupt controllers, in the hole.
pub(crate) const LAPIC_ADDRESS: u32 = 0xfee0_0000;
/// Address of the I/O interrupt controller, in the hole.
pub(crate) const IOAPIC_ADDRESS: u32 = 0xfec0_0000;

/// Address of three pages that KVM on Intel needs for real mode, in the hole.
pub(crate) const TSS_ADDRESS: usize = 0xfffb_d000;
/// Address of one page that KVM on Intel needs for real mode, in the hole.
pub(crate) const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// A range of guest RAM: its block and its guest-physical address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Index in the machine's list of blocks.
    pub block: usize,
    /// Guest-physical address of the block's first byte.
    pub start: u64,
    /// Length of the range in bytes.
    pub len_bytes: u64,
}

/// Address of the registers of the virtio device in slot `slot`.
pub(crate) fn virtio_address(slot: usize) -> u64 {
    VIRTIO_START + slot as u64 * VIRTIO_BYTES
}

/// Interrupt line of the virtio device in slot `slot`.
pub(crate) fn virtio_interrupt(slot: usize) -> u32 {
    VIRTIO_FIRST_INTERRUPT + slot as u32
}

/// The ranges of `ram_bytes` of RAM, below and above the hole.
pub fn ranges(ram_bytes: u64) -> Vec<Range> {
    let low = ram_bytes.min(HOLE_START);
    let mut ranges = vec![Range { block: 0, start: 0, len_bytes: low }];
    if ram_bytes > low {
        ranges.push(Range { block: 1, start: HIGH_START, len_bytes: ram_bytes - low });
    }
    ranges
}
