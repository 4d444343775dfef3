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
mod limits;
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
pub use limits::{MAX_DATA_BYTES, MAX_MESSAGE_FDS, message_limit};
pub use reader::Payload;
pub use version::{Capabilities, MigrationCapability, Version};
