//! Words and lengths that the packets share (`specs/stream.md §3`).

/// First word of the initial packet and of every packet (§3.2, §3.3).
pub const MAGIC: u32 = 0x1122_3344;

/// Second word of the initial packet and of every packet.
pub const VERSION: u32 = 1;

/// Length of the header that all packets share, in bytes (§3.3).
pub const HEADER_BYTES: usize = 12;

/// Length of a RAM packet without payload, in bytes: 320 + 8 × 128 (§3.4).
pub const RAM_PACKET_BYTES: usize = 320 + 8 * crate::limits::PACKET_PAGES;

/// Length of a device-state packet without its payload, in bytes (§3.8).
pub const DEVICE_STATE_PACKET_BYTES: usize = 276;

pub(super) const FLAG_SYNC: u32 = 0x01;
pub(super) const FLAG_DEVICE_STATE: u32 = 0x40;
pub(super) const METHOD_MASK: u32 = 0x3e;

/// Only between two Sternas (`specs/extension.md §10`).
pub(super) const FLAG_DIFFERENCES: u32 = 0x8000_0000;
