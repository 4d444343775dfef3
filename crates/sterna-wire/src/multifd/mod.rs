//! Multifd: the connections beside the main channel that carry pages (`specs/stream.md §3`).
//!
//! Each connection opens with an [`InitialPacket`] and is from then on a sequence of packets of fixed length,
//! each perhaps followed by a payload. [`PacketHeader::peek`] reads the twelve bytes that all packets share and
//! says which kind follows; [`RamPacketView`] reads a RAM packet in place, and [`RamPacketEncoder`] fills one
//! in a buffer that is used again and again. Neither allocates.

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
/// Second word of the same.
pub const VERSION: u32 = 1;
/// Bytes of the header that all packets share (§3.3).
pub const HEADER_BYTES: usize = 12;
/// Bytes of a RAM packet without its payload: 320 + 8 × 128 (§3.4).
pub const RAM_PACKET_BYTES: usize = 320 + 8 * crate::limits::PACKET_PAGES;
/// Bytes of a device-state packet without its payload (§3.8).
pub const DEVICE_STATE_PACKET_BYTES: usize = 276;

const FLAG_SYNC: u32 = 0x01;
const FLAG_DEVICE_STATE: u32 = 0x40;
const METHOD_MASK: u32 = 0x3e;
/// Between two Sternas (`specs/extension.md §10`).
const FLAG_DIFFERENCES: u32 = 0x8000_0000;
