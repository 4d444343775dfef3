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
mod layout;
mod packet;
mod view;

pub use blocks::BlockTable;
pub use device_chunk::{DeviceChunk, DeviceChunkKind};
pub use device_state::DeviceStatePacket;
pub use differences::{Differences, push_difference};
pub use encoder::RamPacketEncoder;
pub use initial::InitialPacket;
pub use layout::{DEVICE_STATE_PACKET_BYTES, HEADER_BYTES, MAGIC, RAM_PACKET_BYTES, VERSION};
pub use packet::{Method, PacketHeader, PacketKind};
pub use view::{Offsets, PageRun, RamPacketView, Runs};
