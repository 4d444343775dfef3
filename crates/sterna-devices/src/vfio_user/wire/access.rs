//! Messages that read and write regions (specs/vfio-user.md §6) and migration data (§8).

use super::error::WireError;
use super::reader::Payload;

/// REGION_READ and REGION_WRITE. A write request and a read answer have `count` bytes of data after this
/// head. A read request and a write answer have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionAccess {
    /// First byte in the region.
    pub offset: u64,
    /// Index of the region.
    pub region: u32,
    /// Number of bytes to read or write.
    pub count: u32,
}

impl RegionAccess {
    /// Length of the head before the data, in bytes.
    pub const BYTES: usize = 16;

    /// Encodes the head of 16 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.offset.to_le_bytes().to_vec();
        bytes.extend(self.region.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes
    }

    /// Decodes a payload without data.
    ///
    /// # Errors
    /// The range exceeds the address space, `count` is greater than `most`, or bytes follow.
    pub fn decode(mut payload: Payload<'_>, most: u32) -> Result<Self, WireError> {
        let this = Self::head(&mut payload, most)?;
        payload.finish()?;
        Ok(this)
    }

    /// Decodes a payload with data.
    ///
    /// # Errors
    /// The same as for [`RegionAccess::decode`], and data of another length than `count`.
    pub fn decode_with_data<'a>(mut payload: Payload<'a>, most: u32) -> Result<(Self, &'a [u8]), WireError> {
        let this = Self::head(&mut payload, most)?;
        let data = payload.bytes("data", this.count.into())?;
        payload.finish()?;
        Ok((this, data))
    }

    fn head(payload: &mut Payload<'_>, most: u32) -> Result<Self, WireError> {
        let (offset, region, count) = (payload.u64("offset")?, payload.u32("region")?, payload.u32("count")?);
        if count > most {
            return Err(payload.bad("count", 4, count.into(), "more than a message may contain"));
        }
        if offset.checked_add(count.into()).is_none() {
            return Err(payload.bad("count", 4, count.into(), "the range ends after the last address"));
        }
        Ok(Self { offset, region, count })
    }
}

/// MIG_DATA_READ and MIG_DATA_WRITE: `size` bytes that are requested, were read, or are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigData {
    /// Number of bytes of migration data.
    pub size: u32,
}

impl MigData {
    /// Length of the head before the data, in bytes.
    pub const BYTES: usize = 8;

    /// Encodes the head. `argsz` includes the head and the data, in both directions.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&(self.size.saturating_add(Self::BYTES as u32)).to_le_bytes());
        bytes[4..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// Decodes a payload without data, which is a request to read.
    ///
    /// # Errors
    /// `size` is greater than `most`, or bytes follow.
    pub fn decode(mut payload: Payload<'_>, most: u32) -> Result<Self, WireError> {
        let this = Self::head(&mut payload, most)?;
        payload.finish()?;
        Ok(this)
    }

    /// Decodes a payload with data.
    ///
    /// # Errors
    /// The same as for [`MigData::decode`], and data of another length than `size`.
    pub fn decode_with_data<'a>(mut payload: Payload<'a>, most: u32) -> Result<(Self, &'a [u8]), WireError> {
        let this = Self::head(&mut payload, most)?;
        let data = payload.bytes("data", this.size.into())?;
        payload.finish()?;
        Ok((this, data))
    }

    fn head(payload: &mut Payload<'_>, most: u32) -> Result<Self, WireError> {
        // Ignored: senders do not agree on whether `argsz` includes the data.
        payload.u32("argsz")?;
        let size = payload.u32("size")?;
        if size > most {
            return Err(payload.bad("size", 4, size.into(), "more than was requested or allowed"));
        }
        Ok(Self { size })
    }
}
