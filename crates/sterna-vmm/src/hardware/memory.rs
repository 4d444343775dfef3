//! Guest RAM for devices in this process, by guest-physical address. A bitmap records the devices' writes.

use std::num::NonZeroUsize;

use sterna_ram::{GuestRam, PAGE_SIZE};
use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, VolatileSlice};

use crate::error::VmmError;
use crate::layout::Range;

/// A view of all of RAM.
pub(crate) type DeviceMemory = GuestMemoryMmap<AtomicBitmap>;
/// A piece of guest RAM.
pub(crate) type Slice<'a> = VolatileSlice<'a, BS<'a, AtomicBitmap>>;

/// RAM and its view, which a VM shares with its devices.
pub(crate) struct VmRam {
    ranges: Vec<Range>,
    /// The view of `ram`.
    memory: DeviceMemory,
    /// Declared after `memory`, so that the view is dropped first.
    ram: GuestRam,
}

impl VmRam {
    /// Takes RAM that is mapped at the guest-physical `ranges`.
    pub(crate) fn new(ram: GuestRam, ranges: Vec<Range>) -> Result<Self, VmmError> {
        // SAFETY: both are parts of one value, which drops RAM last and gives the view out by reference only.
        let memory = unsafe { view(&ram, &ranges) }?;
        Ok(Self { ranges, memory, ram })
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// RAM for devices that write it. The view records their writes.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// The guest-physical ranges of RAM.
    pub(crate) fn ranges(&self) -> &[Range] {
        &self.ranges
    }
}

/// Creates a view of `ram` at the guest-physical `ranges`.
///
/// # Safety
/// `ram` must outlive the view.
pub(crate) unsafe fn view(ram: &GuestRam, ranges: &[Range]) -> Result<DeviceMemory, VmmError> {
    let page = NonZeroUsize::new(PAGE_SIZE).unwrap_or(NonZeroUsize::MIN);
    let refuse = |why: String| VmmError::Config { what: "ram", why };
    let region = |range: &Range| {
        let block = ram.block(range.block);
        let length = usize::try_from(range.len_bytes).map_err(|error| refuse(error.to_string()))?;
        let builder = MmapRegionBuilder::new_with_bitmap(length, AtomicBitmap::new(length, page))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: the pointer covers the block's whole mapping, which the caller keeps as long as the view.
        let mapping = unsafe { builder.with_raw_mmap_pointer(block.host_address()) }.build();
        let mapping = mapping.map_err(|error| refuse(error.to_string()))?;
        GuestRegionMmap::new(mapping, GuestAddress(range.start))
            .ok_or_else(|| refuse("it goes beyond the end of memory".to_owned()))
    };
    let regions: Result<Vec<_>, VmmError> = ranges.iter().map(region).collect();
    GuestMemoryMmap::from_regions(regions?).map_err(|error| refuse(error.to_string()))
}
