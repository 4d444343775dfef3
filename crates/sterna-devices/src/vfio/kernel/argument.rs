//! Builds and reads the uAPI's structures as bytes, in the host's byte order.
//!
//! | structure | fields, at byte |
//! | --- | --- |
//! | `vfio_device_feature` | argsz 0, flags 4, data 8 |
//! | its data for MIGRATION, MIG_DATA_SIZE | a u64 at 0 |
//! | for MIG_DEVICE_STATE | state u32 0, data descriptor i32 4 |
//! | for DMA_LOGGING_START | page size u64 0, ranges u32 8, address of pairs of u64 16 |
//! | for DMA_LOGGING_REPORT | first u64 0, length u64 8, page size u64 16, address of the bitmap 24 |
//! | `vfio_precopy_info` | argsz 0, flags 4, initial u64 8, dirty u64 16 |

use crate::vfio::{PrecopyInfo, feature};

/// Bytes of `struct vfio_device_feature` before the data.
pub(super) const HEAD: usize = 8;
/// Offset of the data descriptor in the answer to a new state.
pub(super) const DATA_FD: usize = HEAD + 4;

/// A `struct vfio_device_feature` with its data.
pub(super) struct Argument {
    pub(super) bytes: Vec<u8>,
}

impl Argument {
    pub(super) fn new(method: u32, feature: u16, data: &[u64]) -> Self {
        let size = HEAD + data.len() * 8;
        let mut bytes = Vec::with_capacity(size);
        // The size fits into 32 bits: it is at most 40 bytes.
        bytes.extend((size as u32).to_ne_bytes());
        bytes.extend((method | u32::from(feature)).to_ne_bytes());
        bytes.extend(data.iter().flat_map(|word| word.to_ne_bytes()));
        Self { bytes }
    }

    /// A request for the device's state, with -1 as the missing descriptor.
    pub(super) fn state(method: u32, number: u32) -> Self {
        let mut argument = Self::new(method, feature::MIG_DEVICE_STATE, &[0]);
        argument.bytes[HEAD..DATA_FD].copy_from_slice(&number.to_ne_bytes());
        argument.bytes[DATA_FD..].copy_from_slice(&(-1i32).to_ne_bytes());
        argument
    }

    /// A request to log `ranges` address ranges. The argument points to them as pairs of address and length.
    pub(super) fn start_logging(page_size: u64, ranges: u32) -> Self {
        let mut argument = Self::new(feature::SET, feature::DMA_LOGGING_START, &[page_size, 0, 0]);
        argument.bytes[HEAD + 8..HEAD + 12].copy_from_slice(&ranges.to_ne_bytes());
        argument
    }

    pub(super) fn word(&self, index: usize) -> u64 {
        read_u64(&self.bytes, HEAD + index * 8)
    }

    pub(super) fn state_number(&self) -> u32 {
        read_u32(&self.bytes, HEAD)
    }
}

/// An empty `struct vfio_precopy_info` for a query.
pub(super) fn precopy_info() -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&24u32.to_ne_bytes());
    bytes
}

pub(super) fn precopy_sizes(answer: &[u8; 24]) -> PrecopyInfo {
    PrecopyInfo { initial_bytes: read_u64(answer, 8), dirty_bytes: read_u64(answer, 16) }
}

/// Reads a u32. Bytes after the end give 0.
pub(super) fn read_u32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_ne_bytes(*word))
}

/// Reads a u64. Bytes after the end give 0.
pub(super) fn read_u64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u64::from_ne_bytes(*word))
}
