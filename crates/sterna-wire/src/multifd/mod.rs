//! Multifd: additional connections that carry pages (`specs/stream.md §3`).
//!
//! Each connection starts with an [`InitialPacket`]. Packets of fixed length follow, and some have a payload.
//! [`PacketHeader::peek`] reads the twelve bytes that all packets share, and returns the kind of the packet.
//! [`RamPacketView`] reads a RAM packet in place. [`RamPacketEncoder`] fills RAM packets in a reusable buffer.
//! Neither allocates per packet.

mod blocks;
mod device_chunk;
mod device_state;
mod differences;
mod encoder;
mod initial;
mod packet;
mod view;

pub use blocks::BlockTable;
pub use device_chunk::{DeviceChunk, DeviceChunkKind};
pub use device_state::DeviceStatePacket;
pub use differences::{Differences, push_difference};
pub use encoder::RamPacketEncoder;
pub use initial::InitialPacket;
pub use packet::{Method, PacketHeader, PacketKind};
pub use view::{Offsets, PageRun, RamPacketView, Runs};

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

const FLAG_SYNC: u32 = 0x01;
const FLAG_DEVICE_STATE: u32 = 0x40;
const METHOD_MASK: u32 = 0x3e;
/// Only between two Sternas (`specs/extension.md §10`).
const FLAG_DIFFERENCES: u32 = 0x8000_0000;
