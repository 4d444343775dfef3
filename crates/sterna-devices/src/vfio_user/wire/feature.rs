//! DEVICE_FEATURE and the payloads of the features that migrations use (specs/vfio-user.md §7).

use super::error::WireError;
use super::reader::Payload;
use crate::vfio::{MigState, MigrationFeatures, feature};

/// A feature of Sterna's own: GET, [`PrecopySizes`]. The kernel has an ioctl for it, vfio-user has no
/// message.
pub const PRECOPY_INFO: u16 = 0xff53;

/// The head of a feature request, with the feature's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureRequest<'a> {
    /// Number of the feature.
    pub feature: u16,
    /// One of [`feature::GET`], [`feature::SET`] and [`feature::PROBE`], or PROBE with any of the others.
    pub method: u32,
    /// Data of the feature.
    pub data: &'a [u8],
}

impl<'a> FeatureRequest<'a> {
    /// Length of the head before the data, in bytes.
    pub const BYTES: usize = 8;

    /// Encodes the payload. `room` is the number of data bytes that the answer may have.
    pub fn encode(&self, room: usize) -> Vec<u8> {
        let argsz = Self::BYTES + self.data.len().max(room);
        let mut bytes = u32::try_from(argsz).unwrap_or(u32::MAX).to_le_bytes().to_vec();
        bytes.extend((u32::from(self.feature) | self.method).to_le_bytes());
        bytes.extend(self.data);
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// Unknown flags, or not exactly one method.
    pub fn decode(mut payload: Payload<'a>) -> Result<Self, WireError> {
        payload.argsz(Self::BYTES as u32)?;
        let flags = payload.u32("flags")?;
        let method = flags & !feature::MASK;
        let known = feature::GET | feature::SET | feature::PROBE;
        let one = method == feature::GET || method == feature::SET || method & feature::PROBE != 0;
        if method & !known != 0 || !one {
            let rule = "GET (bit 16), SET (bit 17) or PROBE (bit 18) is needed";
            return Err(payload.bad("flags", 4, flags.into(), rule));
        }
        Ok(Self { feature: (flags & feature::MASK) as u16, method, data: payload.rest() })
    }
}

/// The data of [`feature::MIG_DEVICE_STATE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceState(pub MigState);

impl DeviceState {
    /// Encodes the data. The descriptor after the state has no meaning in vfio-user.
    pub fn encode(self) -> Vec<u8> {
        let mut bytes = self.0.number().to_le_bytes().to_vec();
        bytes.extend((-1i32).to_le_bytes());
        bytes
    }

    /// Decodes the data after a feature's head.
    ///
    /// # Errors
    /// The number belongs to no state.
    pub fn decode(message: &'static str, data: &[u8]) -> Result<Self, WireError> {
        let mut payload = behind_head(message, data);
        let number = payload.u32("device_state")?;
        let state = MigState::from_number(number)
            .ok_or_else(|| payload.bad("device_state", 4, number.into(), "this state does not exist"))?;
        payload.u32("data_fd")?;
        payload.finish()?;
        Ok(Self(state))
    }
}

/// Decodes the data of [`feature::MIGRATION`].
///
/// # Errors
/// The device cannot be stopped and read.
pub fn decode_flags(message: &'static str, data: &[u8]) -> Result<MigrationFeatures, WireError> {
    let mut payload = behind_head(message, data);
    let flags = payload.u64("flags")?;
    let features = MigrationFeatures::from_flags(flags)
        .ok_or_else(|| payload.bad("flags", 8, flags, "STOP_COPY (bit 0) is required"))?;
    payload.finish()?;
    Ok(features)
}

/// Decodes the data of [`feature::MIG_DATA_SIZE`], a u64.
///
/// # Errors
/// The data has another length.
pub fn decode_size(message: &'static str, data: &[u8]) -> Result<u64, WireError> {
    let mut payload = behind_head(message, data);
    let size = payload.u64("stop_copy_length")?;
    payload.finish()?;
    Ok(size)
}

/// The data of [`PRECOPY_INFO`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecopySizes {
    /// Bytes that can be read while the device runs and were never read.
    pub initial_bytes: u64,
    /// Bytes that can be read while the device runs and changed after they were read.
    pub dirty_bytes: u64,
}

impl PrecopySizes {
    /// Encodes the feature's data.
    pub fn encode(&self) -> Vec<u8> {
        [self.initial_bytes.to_le_bytes(), self.dirty_bytes.to_le_bytes()].concat()
    }

    /// Decodes the data after a feature's head.
    ///
    /// # Errors
    /// The data has another length.
    pub fn decode(message: &'static str, data: &[u8]) -> Result<Self, WireError> {
        let mut payload = behind_head(message, data);
        let (initial_bytes, dirty_bytes) = (payload.u64("initial_bytes")?, payload.u64("dirty_bytes")?);
        payload.finish()?;
        Ok(Self { initial_bytes, dirty_bytes })
    }
}

/// A range of guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaLogRange {
    /// First address in bytes.
    pub address: u64,
    /// Length of the range in bytes.
    pub length: u64,
}

impl DmaLogRange {
    fn decode(payload: &mut Payload<'_>, page_size: u64) -> Result<Self, WireError> {
        let address = payload.u64("iova")?;
        if !address.is_multiple_of(page_size) {
            return Err(payload.bad("iova", 8, address, "it is not page-aligned"));
        }
        let length = payload.u64("length")?;
        if length == 0 || !length.is_multiple_of(page_size) || address.checked_add(length).is_none() {
            return Err(payload.bad(
                "length",
                8,
                length,
                "it is not a number of pages up to the last address",
            ));
        }
        Ok(Self { address, length })
    }
}

/// The data of [`feature::DMA_LOGGING_START`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmaLogStart {
    /// Bytes per bit of the bitmap.
    pub page_size: u64,
    /// The ranges to log.
    pub ranges: Vec<DmaLogRange>,
}

impl DmaLogStart {
    /// Encodes the feature's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.page_size.to_le_bytes().to_vec();
        bytes.extend((self.ranges.len() as u32).to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        for range in &self.ranges {
            bytes.extend(range.address.to_le_bytes());
            bytes.extend(range.length.to_le_bytes());
        }
        bytes
    }

    /// Decodes the data after a feature's head. The number of ranges must match the length of the data.
    ///
    /// # Errors
    /// An invalid page size, ranges that are not page-aligned, or a wrong number of ranges.
    pub fn decode(message: &'static str, data: &[u8]) -> Result<Self, WireError> {
        let mut payload = behind_head(message, data);
        let page_size = page_size(&mut payload)?;
        let count = payload.u32("num_ranges")?;
        payload.u32("reserved")?;
        if payload.left() as u64 != u64::from(count) * 16 {
            return Err(payload.bad(
                "num_ranges",
                8,
                count.into(),
                "it differs from the number of ranges in the message",
            ));
        }
        let ranges =
            (0..count).map(|_| DmaLogRange::decode(&mut payload, page_size)).collect::<Result<_, _>>()?;
        payload.finish()?;
        Ok(Self { page_size, ranges })
    }
}

/// The data of [`feature::DMA_LOGGING_REPORT`]. In the answer the bitmap follows: one bit per page, lowest
/// bit first, in whole words of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaLogReport {
    /// The range of the report.
    pub range: DmaLogRange,
    /// Bytes per bit of the bitmap.
    pub page_size: u64,
}

impl DmaLogReport {
    /// Length of the head before the bitmap, in bytes.
    pub const BYTES: usize = 24;

    /// Encodes the head of 24 bytes.
    pub fn encode(&self) -> Vec<u8> {
        [self.range.address, self.range.length, self.page_size]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    /// Length of the bitmap in bytes.
    pub fn bitmap_bytes(&self) -> u64 {
        (self.range.length / self.page_size).div_ceil(64) * 8
    }

    /// Decodes the data after a feature's head. Returns the report and the bytes of the bitmap, which may be
    /// empty.
    ///
    /// # Errors
    /// An invalid page size, or a range that is not page-aligned.
    pub fn decode<'a>(message: &'static str, data: &'a [u8]) -> Result<(Self, &'a [u8]), WireError> {
        let mut payload = behind_head(message, data);
        let (address, length) = (payload.u64("iova")?, payload.u64("length")?);
        let page_size = page_size(&mut payload)?;
        let mut range = behind_head(message, data);
        let range = DmaLogRange::decode(&mut range, page_size)?;
        debug_assert_eq!((range.address, range.length), (address, length));
        Ok((Self { range, page_size }, payload.rest()))
    }
}

fn page_size(payload: &mut Payload<'_>) -> Result<u64, WireError> {
    let page_size = payload.u64("page_size")?;
    if page_size.is_power_of_two() && (4096..=1 << 30).contains(&page_size) {
        Ok(page_size)
    } else {
        Err(payload.bad("page_size", 8, page_size, "a power of two from 4096 to 2^30 is needed"))
    }
}

/// A reader for the data after a feature's head. Errors count bytes from the message's start.
fn behind_head<'a>(message: &'static str, data: &'a [u8]) -> Payload<'a> {
    Payload::new_at(message, data, FeatureRequest::BYTES)
}
