//! Encodes and decodes the messages of vfio-user (specs/vfio-user.md §2 to §8).
//!
//! A message is a [`Header`] of 16 bytes and a payload, all little-endian. This module does no I/O. It checks
//! every length, count and index of the peer before use. An error names the message, the byte and the broken
//! rule. Bytes are counted from the first byte of the header.

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
