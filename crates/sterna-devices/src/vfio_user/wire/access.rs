//! Reading and writing: regions (specs/vfio-user.md §6) and migration data (§8).

use super::error::WireError;
use super::reader::Payload;

/// REGION_READ and REGION_WRITE. What writes and what answers a read has `count` bytes of data behind it; what
/// reads and what answers a write has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionAccess {
    /// Where in the region.
    pub offset: u64,
    /// Which region.
    pub region: u32,
    /// How many bytes.
    pub count: u32,
}

impl RegionAccess {
    /// Bytes in front of the data.
    pub const BYTES: usize = 16;

    /// What stands in front of the data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.offset.to_le_bytes().to_vec();
        bytes.extend(self.region.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes
    }

    /// Out of a payload that has no data.
    ///
    /// # Errors
    /// The range ends after the last address, `count` is above `most`, or there are bytes behind it.
    pub fn decode(mut payload: Payload<'_>, most: u32) -> Result<Self, WireError> {
        let this = Self::head(&mut payload, most)?;
        payload.finish()?;
        Ok(this)
    }

    /// Out of a payload with data.
    ///
    /// # Errors
    /// As [`RegionAccess::decode`], and data that is not of `count` bytes.
    pub fn decode_with_data<'a>(mut payload: Payload<'a>, most: u32) -> Result<(Self, &'a [u8]), WireError> {
        let this = Self::head(&mut payload, most)?;
        let data = payload.bytes("data", this.count.into())?;
        payload.finish()?;
        Ok((this, data))
    }

    fn head(payload: &mut Payload<'_>, most: u32) -> Result<Self, WireError> {
        let (offset, region, count) = (payload.u64("offset")?, payload.u32("region")?, payload.u32("count")?);
        if count > most {
            return Err(payload.bad("count", 4, count.into(), "more than one message may carry"));
        }
        if offset.checked_add(count.into()).is_none() {
            return Err(payload.bad("count", 4, count.into(), "the range ends after the last address"));
        }
        Ok(Self { offset, region, count })
    }
}

/// MIG_DATA_READ and MIG_DATA_WRITE: `size` bytes that are wanted, came, or are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigData {
    /// How many bytes.
    pub size: u32,
}

impl MigData {
    /// Bytes in front of the data.
    pub const BYTES: usize = 8;

    /// What stands in front of the data. `argsz` counts it and the data, of either way.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&(self.size.saturating_add(Self::BYTES as u32)).to_le_bytes());
        bytes[4..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// Out of a payload that has no data: a wish to read.
    ///
    /// # Errors
    /// `size` is above `most`, or there are bytes behind it.
    pub fn decode(mut payload: Payload<'_>, most: u32) -> Result<Self, WireError> {
        let this = Self::head(&mut payload, most)?;
        payload.finish()?;
        Ok(this)
    }

    /// Out of a payload with data.
    ///
    /// # Errors
    /// As [`MigData::decode`], and data that is not of `size` bytes.
    pub fn decode_with_data<'a>(mut payload: Payload<'a>, most: u32) -> Result<(Self, &'a [u8]), WireError> {
        let this = Self::head(&mut payload, most)?;
        let data = payload.bytes("data", this.size.into())?;
        payload.finish()?;
        Ok((this, data))
    }

    fn head(payload: &mut Payload<'_>, most: u32) -> Result<Self, WireError> {
        // Senders do not agree on whether it counts the data, so nothing is built on it.
        payload.u32("argsz")?;
        let size = payload.u32("size")?;
        if size > most {
            return Err(payload.bad("size", 4, size.into(), "more than was requested or allowed"));
        }
        Ok(Self { size })
    }
}
