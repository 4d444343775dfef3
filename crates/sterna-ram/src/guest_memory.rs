//! Makes blocks of guest RAM from the guest memory of the `vm-memory` crate.

use std::fs;
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::block::RamBlock;
use crate::error::RamError;
use crate::external::ExternalMemory;
use crate::guest::GuestRam;
use crate::permissions::MemoryPermissions;

/// The settings of a block over a region of guest memory: see [`GuestRam::from_guest_memory`]. Only the name is
/// required.
#[derive(Debug, Clone)]
#[must_use]
pub struct RegionPlan {
    name: String,
    permissions: MemoryPermissions,
    is_filled_on_demand: bool,
    is_fresh: bool,
}

impl RegionPlan {
    /// Names the block, with 1 to 255 bytes. Source and destination must use the same names.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            permissions: MemoryPermissions::none(),
            is_filled_on_demand: false,
            is_fresh: false,
        }
    }

    /// Sets the operations that the engine may do on the memory; the default is none.
    pub fn permit(mut self, permissions: MemoryPermissions) -> Self {
        self.permissions = permissions;
        self
    }

    /// States that missing pages are filled when they are first touched: see
    /// [`ExternalMemory::filled_on_demand`].
    pub fn filled_on_demand(mut self) -> Self {
        self.is_filled_on_demand = true;
        self
    }

    /// States that the memory is fresh: see [`RamBlock::declare_fresh`].
    pub fn fresh(mut self) -> Self {
        self.is_fresh = true;
        self
    }
}

impl From<String> for RegionPlan {
    fn from(name: String) -> Self {
        Self::named(name)
    }
}

impl From<&str> for RegionPlan {
    fn from(name: &str) -> Self {
        Self::named(name)
    }
}

impl GuestRam {
    /// Makes guest RAM from `vm-memory`: one block per region, at its guest address.
    ///
    /// The blocks keep the regions' mappings alive. `plan` is called for each region with its index. It returns
    /// the block's name and the operations that the engine may do on the memory.
    ///
    /// ```
    /// use sterna_ram::{GuestRam, MemoryPermissions, RegionPlan};
    /// use vm_memory::{GuestAddress, GuestMemoryMmap, GuestMemoryRegion};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let memory: GuestMemoryMmap =
    ///     GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 2 << 20)])?;
    ///
    /// // The engine only reads and writes.
    /// let ram = GuestRam::from_guest_memory(&memory, |index, _| format!("ram{index}"))?;
    /// assert_eq!((ram.block(1).name(), ram.block(1).guest_address()), ("ram1", Some(1 << 32)));
    ///
    /// // Memory that no device has pinned may be given back; it was just mapped.
    /// let ram = GuestRam::from_guest_memory(&memory, |_, region| {
    ///     RegionPlan::named(format!("ram@{:#x}", region.start_addr().0))
    ///         .permit(MemoryPermissions::none().allow_discard())
    ///         .fresh()
    /// })?;
    /// # assert!(ram.block(0).permissions().discard);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The errors of [`RamBlock::from_external`] and [`GuestRam::new`], and [`RamError::External`] for a region
    /// that does not own its mapping (`MmapRegion::build_raw`). A caller that knows the lifetime of such a
    /// mapping can use [`RamBlock::from_external`].
    pub fn from_guest_memory<B, P>(
        memory: &GuestMemoryMmap<B>,
        mut plan: impl FnMut(usize, &GuestRegionMmap<B>) -> P,
    ) -> Result<Self, RamError>
    where
        B: vm_memory::bitmap::Bitmap + Send + Sync + 'static,
        P: Into<RegionPlan>,
    {
        let regions = memory.iter().enumerate();
        let blocks = regions.map(|(index, region)| RamBlock::from_region(region, plan(index, region).into()));
        GuestRam::new(blocks.collect::<Result<_, _>>()?)
    }
}

impl RamBlock {
    /// Makes a block over one plugged region of guest memory, at its guest address.
    ///
    /// See [`GuestRam::from_guest_memory`].
    ///
    /// # Errors
    /// The errors of [`GuestRam::from_guest_memory`].
    pub fn from_region<B>(region: &GuestRegionMmap<B>, plan: impl Into<RegionPlan>) -> Result<Self, RamError>
    where
        B: vm_memory::bitmap::Bitmap + Send + Sync + 'static,
    {
        let plan = plan.into();
        let mapping = region.get_mmap();
        let refuse = |rule| Err(RamError::External { block: plan.name.clone(), rule });
        if !mapping.owned() {
            return refuse("the region does not own its mapping, so its lifetime is unknown");
        }
        if mapping.prot() & libc::PROT_READ == 0 {
            return refuse("it cannot be read");
        }
        let mut external =
            ExternalMemory::new(mapping.as_ptr(), mapping.size() as u64, Arc::clone(&mapping) as Arc<_>)
                .permit(plan.permissions);
        if let Some(range) = mapping.file_offset() {
            external = external.file(Arc::clone(range.arc()), range.start());
        } else if let Some(bytes) = huge_page_bytes(mapping.flags()) {
            external = external.huge_pages(bytes);
        }
        if mapping.flags() & libc::MAP_TYPE != libc::MAP_PRIVATE {
            external = external.shared();
        }
        if mapping.prot() & libc::PROT_WRITE == 0 {
            external = external.read_only();
        }
        if plan.is_filled_on_demand {
            external = external.filled_on_demand();
        }
        if plan.is_fresh {
            external = external.fresh();
        }
        // SAFETY: the region mapped this memory itself, as its fields show. It unmaps the memory when the last
        // Arc is dropped, and the block keeps one. It hands out only raw pointers and references to atomics.
        let block = unsafe { RamBlock::from_external(plan.name, external) }?;
        Ok(block.at_guest_address(region.start_addr().0))
    }
}

/// Returns the huge page size of a mapping without a file, from its flags.
fn huge_page_bytes(flags: i32) -> Option<u64> {
    if flags & libc::MAP_HUGETLB == 0 {
        return None;
    }
    match (flags >> libc::MAP_HUGE_SHIFT) & libc::MAP_HUGE_MASK {
        0 => Some(default_huge_page_bytes().unwrap_or(2 << 20)),
        shift => Some(1 << shift),
    }
}

fn default_huge_page_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}
