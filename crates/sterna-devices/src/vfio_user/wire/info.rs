//! Descriptions of the device, its regions and its interrupts (specs/vfio-user.md §5).

use vfio_bindings::bindings::vfio as sys;

use super::error::WireError;
use super::reader::Payload;

/// Flag of a region that can be read.
pub const REGION_READABLE: u32 = sys::VFIO_REGION_INFO_FLAG_READ;
/// Flag of a region that can be written.
pub const REGION_WRITABLE: u32 = sys::VFIO_REGION_INFO_FLAG_WRITE;

/// The device's description. In a request all fields except `argsz` are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceInfo {
    /// `VFIO_DEVICE_FLAGS_*` of the device.
    pub flags: u32,
    /// Number of the device's regions.
    pub regions: u32,
    /// Number of interrupt types.
    pub irqs: u32,
}

impl DeviceInfo {
    /// Encodes the payload of an answer.
    pub fn encode(&self) -> Vec<u8> {
        words(&[16, self.flags, self.regions, self.irqs])
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// The payload has another length.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        payload.argsz(16)?;
        let [flags, regions, irqs] =
            [payload.u32("flags")?, payload.u32("num_regions")?, payload.u32("num_irqs")?];
        payload.finish()?;
        Ok(Self { flags, regions, irqs })
    }
}

/// A region's description. In a request all fields except `argsz` and the index are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegionInfo {
    /// [`REGION_READABLE`], [`REGION_WRITABLE`] or both.
    pub flags: u32,
    /// Index of the region.
    pub index: u32,
    /// Length of the region in bytes.
    pub size: u64,
}

impl RegionInfo {
    /// Encodes the payload. Regions here have neither capabilities nor mappable parts.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = words(&[32, self.flags, self.index, 0]);
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes
    }

    /// Decodes a payload. Capabilities after it are ignored, because no region is mapped here.
    ///
    /// # Errors
    /// The payload is too short.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        payload.argsz(32)?;
        let [flags, index] = [payload.u32("flags")?, payload.u32("index")?];
        payload.u32("cap_offset")?;
        let size = payload.u64("size")?;
        payload.u64("offset")?;
        payload.rest();
        Ok(Self { flags, index, size })
    }
}

/// An interrupt type's description. In a request all fields except `argsz` and the index are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IrqInfo {
    /// `VFIO_IRQ_INFO_*` of the type.
    pub flags: u32,
    /// Index of the interrupt type.
    pub index: u32,
    /// Number of interrupts of this type.
    pub count: u32,
}

impl IrqInfo {
    /// Encodes the payload of an answer.
    pub fn encode(&self) -> Vec<u8> {
        words(&[16, self.flags, self.index, self.count])
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// The payload has another length.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        payload.argsz(16)?;
        let [flags, index, count] = [payload.u32("flags")?, payload.u32("index")?, payload.u32("count")?];
        payload.finish()?;
        Ok(Self { flags, index, count })
    }
}

/// Connects interrupts. The message may carry eventfds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IrqSet<'a> {
    /// `VFIO_IRQ_SET_*`: one action and one kind of data.
    pub flags: u32,
    /// Index of the interrupt type.
    pub index: u32,
    /// First interrupt of the type.
    pub start: u32,
    /// Number of interrupts to connect.
    pub count: u32,
    /// With `VFIO_IRQ_SET_DATA_BOOL`: one byte per interrupt.
    pub data: &'a [u8],
}

impl<'a> IrqSet<'a> {
    /// Encodes the payload of a request.
    pub fn encode(&self) -> Vec<u8> {
        let argsz = 20 + self.data.len() as u32;
        let mut bytes = words(&[argsz, self.flags, self.index, self.start, self.count]);
        bytes.extend(self.data);
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// Not exactly one action and one kind of data, a count that exceeds the number range, or data of the
    /// wrong length.
    pub fn decode(mut payload: Payload<'a>) -> Result<Self, WireError> {
        payload.argsz(20)?;
        let flags = payload.u32("flags")?;
        let (kinds, actions) = (sys::VFIO_IRQ_SET_DATA_TYPE_MASK, sys::VFIO_IRQ_SET_ACTION_TYPE_MASK);
        let one_each = (flags & kinds).count_ones() == 1 && (flags & actions).count_ones() == 1;
        if !one_each || flags & !(kinds | actions) != 0 {
            return Err(payload.bad("flags", 4, flags.into(), "one action and one kind of data are needed"));
        }
        let [index, start, count] = [payload.u32("index")?, payload.u32("start")?, payload.u32("count")?];
        if start.checked_add(count).is_none() {
            return Err(payload.bad("count", 4, count.into(), "the range ends after the last number"));
        }
        let bools = if flags & sys::VFIO_IRQ_SET_DATA_BOOL != 0 { count } else { 0 };
        let data = payload.bytes("data", bools.into())?;
        payload.finish()?;
        Ok(Self { flags, index, start, count, data })
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
