//! DMA_MAP and DMA_UNMAP: the guest RAM that the device may use (specs/vfio-user.md §4).

use vfio_bindings::bindings::vfio as sys;

use super::error::WireError;
use super::reader::Payload;

/// Flag of a map: the device may read.
pub const DMA_READ: u32 = sys::VFIO_DMA_MAP_FLAG_READ;
/// Flag of a map: the device may write.
pub const DMA_WRITE: u32 = sys::VFIO_DMA_MAP_FLAG_WRITE;
/// Flag of an unmap: return the dirty bitmap. Not supported here.
pub const UNMAP_GET_DIRTY_BITMAP: u32 = sys::VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP;
/// Flag of an unmap: withdraw all regions.
pub const UNMAP_ALL: u32 = sys::VFIO_DMA_UNMAP_FLAG_ALL;

const PAGE_BYTES: u64 = 4096;

/// A region of guest RAM. The message carries its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMap {
    /// [`DMA_READ`], [`DMA_WRITE`] or both.
    pub flags: u32,
    /// First byte in the descriptor's file.
    pub offset: u64,
    /// Address at which the device sees the region.
    pub address: u64,
    /// Length of the region in bytes.
    pub size: u64,
}

impl DmaMap {
    const BYTES: u32 = 32;

    /// Encodes the payload, which has no data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES as usize);
        bytes.extend(Self::BYTES.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        for word in [self.offset, self.address, self.size] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// Unknown flags; a region that is not page-aligned, is empty, or exceeds the address space.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        payload.argsz(Self::BYTES)?;
        let flags = payload.u32("flags")?;
        if flags & !(DMA_READ | DMA_WRITE) != 0 {
            return Err(payload.bad("flags", 4, flags.into(), "only reading (1) and writing (2) are known"));
        }
        let offset = pages(&mut payload, "offset")?;
        let address = pages(&mut payload, "address")?;
        let size = pages(&mut payload, "size")?;
        if size == 0 {
            return Err(payload.bad("size", 8, size, "a region cannot be empty"));
        }
        if address.checked_add(size).is_none()
            || offset.checked_add(size).is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(payload.bad("size", 8, size, "the region ends after the last address"));
        }
        payload.finish()?;
        Ok(Self { flags, offset, address, size })
    }
}

/// A region that the device may no longer use. The reply has the same payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaUnmap {
    /// [`UNMAP_ALL`] with address and size 0; otherwise 0.
    pub flags: u32,
    /// Address of the mapped region.
    pub address: u64,
    /// Length of the mapped region in bytes.
    pub size: u64,
}

impl DmaUnmap {
    const BYTES: u32 = 24;

    /// Encodes the payload, which has no data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES as usize);
        bytes.extend(Self::BYTES.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// Unknown or unsupported flags, or a region that exceeds the address space.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        payload.argsz(Self::BYTES)?;
        let flags = payload.u32("flags")?;
        if flags & UNMAP_GET_DIRTY_BITMAP != 0 {
            let rule = "use DMA_LOGGING_REPORT for dirty bitmaps, before the region is unmapped";
            return Err(payload.bad("flags", 4, flags.into(), rule));
        }
        if flags & !UNMAP_ALL != 0 {
            return Err(payload.bad("flags", 4, flags.into(), "only unmapping all (2) is supported"));
        }
        let address = payload.u64("address")?;
        let size = payload.u64("size")?;
        if flags == UNMAP_ALL && (address, size) != (0, 0) {
            return Err(payload.bad("size", 8, size, "all regions have neither address nor size"));
        }
        if address.checked_add(size).is_none() {
            return Err(payload.bad("size", 8, size, "the region ends after the last address"));
        }
        payload.finish()?;
        Ok(Self { flags, address, size })
    }
}

fn pages(payload: &mut Payload<'_>, field: &'static str) -> Result<u64, WireError> {
    let value = payload.u64(field)?;
    if value.is_multiple_of(PAGE_BYTES) {
        Ok(value)
    } else {
        Err(payload.bad(field, 8, value, "it is not a multiple of 4096"))
    }
}
