//! Messages of vfio-user: bytes ⇄ values (specs/vfio-user.md §2 to §8).
//!
//! A message is a [`Header`] of 16 bytes and a payload. Everything is little-endian. Nothing here does I/O. A
//! length, count or index of the peer is checked before it is used, and an error says at which byte of which
//! message which rule is broken; bytes are counted from the header's first.

mod access;
mod dma;
mod error;
mod feature;
mod header;
mod info;
mod reader;
mod version;

pub use access::{MigData, RegionAccess};
pub use dma::{DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, UNMAP_ALL, UNMAP_GET_DIRTY_BITMAP};
pub use error::WireError;
pub use feature::{
    DeviceState, DmaLogRange, DmaLogReport, DmaLogStart, FeatureRequest, PRECOPY_INFO, PrecopySizes,
    decode_flags, decode_size,
};
pub use header::{Command, HEADER_BYTES, Header, Kind};
pub use info::{DeviceInfo, IrqInfo, IrqSet, REGION_READABLE, REGION_WRITABLE, RegionInfo};
pub use reader::Payload;
pub use version::{Capabilities, MigrationCapability, Version};

/// The most data bytes that one message carries, if the other side does not say less: 1 MiB.
pub const MAX_DATA_BYTES: u32 = 1 << 20;

/// What a message has beside its data at most.
const MAX_HEAD_BYTES: u32 = 64;

/// The most bytes of a message with at most so many data bytes.
pub fn message_limit(data_bytes: u32) -> u32 {
    data_bytes.saturating_add(MAX_HEAD_BYTES)
}

/// The most descriptors that come with one message.
pub const MAX_MESSAGE_FDS: usize = 8;
