//! Where things are in guest-physical memory, as the guests see it.
//!
//! | guest-physical | what |
//! | --- | --- |
//! | `0 ..` | RAM block `ram.low`, at most 3 GiB |
//! | 3 GiB .. 4 GiB | hole: virtio devices from 0xd0000000 on, IOAPIC at 0xfec00000, LAPIC at 0xfee00000 |
//! | 4 GiB .. | RAM block `ram.high`: the rest, if there is any |
//!
//! Of the first MiB a flat 64-bit guest finds in use, all of it ordinary RAM that migrates:
//!
//! | address | what |
//! | --- | --- |
//! | [`GDT`] | null, 64-bit code (selector 0x08), data (0x10), a task-state descriptor (0x18) |
//! | [`BOOT_PARAMETERS`] | the boot-parameter page, see below |
//! | [`PAGE_TABLES`] | identity mapping of the first 4 GiB and of all RAM, in 2 MiB or 1 GiB pages |
//! | [`STACKS`] | 4 KiB of stack for each vCPU; vCPU i starts with `rsp = STACKS + (i + 1) * 4096` |
//! | [`FLAT_ENTRY`] | the guest's code: its first byte is the entry of every vCPU |
//!
//! Every vCPU starts there in long mode, interrupts off, `rdi` = its index, `rsi` = [`BOOT_PARAMETERS`],
//! all other general registers 0, SSE enabled (CR4.OSFXSR), no IDT.
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
//! | 40 | 4 × (start, length) of RAM that the guest may use as it likes; the first n are filled |
//! | 104 | number of parameters, at most [`PARAMETERS_MAX`] |
//! | 112 | the parameters of the configuration, for the guest to interpret |

/// One GiB.
pub const GIB: u64 = 1 << 30;
/// End of low RAM at most; the hole begins here.
pub const HOLE_START: u64 = 3 * GIB;
/// Where high RAM begins.
pub const HIGH_START: u64 = 4 * GIB;
/// The least RAM a machine may have: 64 MiB.
pub const RAM_MIN_BYTES: u64 = 64 << 20;
/// The block of RAM below the hole.
pub const LOW_BLOCK: &str = "ram.low";
/// The block of RAM above 4 GiB.
pub const HIGH_BLOCK: &str = "ram.high";

/// Global descriptor table of flat guests.
pub const GDT: u64 = 0x1000;
/// The boot-parameter page.
pub const BOOT_PARAMETERS: u64 = 0x7000;
/// Boot sectors are loaded and started here, as a PC's BIOS would.
pub const BOOT_SECTOR: u64 = 0x7c00;
/// PML4, then PDPT, then page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// First stack.
pub const STACKS: u64 = 0x8_0000;
/// A Linux kernel's command line.
pub const COMMAND_LINE: u64 = 0x6_0000;
/// Its length without the NUL, at most.
pub const COMMAND_LINE_MAX: usize = 0xffff;
/// Where a PC's processor starts: the firmware's entry in real mode.
pub(crate) const RESET_VECTOR: u64 = 0xf_fff0;
/// End of the RAM below 1 MiB that a Linux kernel may use.
pub(crate) const LOW_RAM_END: u64 = 0x9_fc00;
/// Load address and entry of flat guests: 1 MiB.
pub const FLAT_ENTRY: u64 = 0x10_0000;

/// First word of the boot-parameter page: the bytes `STRNBOOT`.
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"STRNBOOT");
/// Version of the boot-parameter page.
pub const BOOT_VERSION: u64 = 1;
/// Offset of the first RAM range in the boot-parameter page.
pub const BOOT_RANGES: u64 = 40;
/// Offset of the parameters' count in the boot-parameter page.
pub const BOOT_PARAMETER_COUNT: u64 = 104;
/// Parameters that a configuration may give.
pub const PARAMETERS_MAX: usize = 64;

/// Serial console: 8 ports from here, interrupt 4.
pub const SERIAL_PORT: u16 = 0x3f8;
/// The serial console's interrupt line.
pub const SERIAL_IRQ: u32 = 4;
/// A byte written here ends the guest with that byte as its code.
pub const EXIT_PORT: u16 = 0xf4;
/// Keyboard controller: [`KEYBOARD_RESET`] written here resets the machine.
pub const KEYBOARD_PORT: u16 = 0x64;
/// What resets the machine.
pub const KEYBOARD_RESET: u8 = 0xfe;
/// A kernel that panics writes bit 0 here, as of QEMU's `pvpanic`.
pub const PANIC_PORT: u16 = 0x505;
/// ACPI's sleep control register: bit 5 with [`SLEEP_TYPE_OFF`] in bits 2 to 4 switches the machine off.
pub const SLEEP_PORT: u16 = 0x600;
/// ACPI's sleep status register: reads as 0.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI's state S5.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// Virtio devices that a machine may have: each has an interrupt of its own.
pub const VIRTIO_MAX: usize = 8;
/// How far apart virtio devices are.
pub(crate) const VIRTIO_BYTES: u64 = 0x1000;
/// The first virtio device, in the hole.
const VIRTIO_START: u64 = 0xd000_0000;
/// The first virtio device's interrupt: the first one that no device of a PC has.
const VIRTIO_FIRST_INTERRUPT: u32 = 16;
/// The vCPUs' interrupt controllers, in the hole.
pub(crate) const LAPIC_ADDRESS: u32 = 0xfee0_0000;
/// The I/O interrupt controller, in the hole.
pub(crate) const IOAPIC_ADDRESS: u32 = 0xfec0_0000;

/// Three pages that KVM on Intel needs for real mode, in the hole.
pub(crate) const TSS_ADDRESS: usize = 0xfffb_d000;
/// One page that KVM on Intel needs for real mode, in the hole.
pub(crate) const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// A piece of guest RAM: where the guest sees it, and where it is in its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Index in the machine's list of blocks.
    pub block: usize,
    /// Guest-physical address of the block's first byte.
    pub start: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Where the registers of the virtio device in place `slot` are.
pub(crate) fn virtio_address(slot: usize) -> u64 {
    VIRTIO_START + slot as u64 * VIRTIO_BYTES
}

/// The interrupt of the virtio device in place `slot`.
pub(crate) fn virtio_interrupt(slot: usize) -> u32 {
    VIRTIO_FIRST_INTERRUPT + slot as u32
}

/// How `ram_bytes` of RAM lie around the hole.
pub fn ranges(ram_bytes: u64) -> Vec<Range> {
    let low = ram_bytes.min(HOLE_START);
    let mut ranges = vec![Range { block: 0, start: 0, len_bytes: low }];
    if ram_bytes > low {
        ranges.push(Range { block: 1, start: HIGH_START, len_bytes: ram_bytes - low });
    }
    ranges
}
