//! Uses the bitmaps of `vm-memory` as a software dirty log of the VMM's emulated devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, MmapRegion};

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::{SyncReport, SyncTimes};
use crate::bitmap::PageBitmap;
use crate::block::RamBlock;
use crate::error::DirtyError;
use crate::guest::GuestRam;

const NAME: &str = "atomic-bitmap";

/// Reports the writes through a `GuestMemoryMmap<AtomicBitmap>`, which are those of emulated devices.
///
/// Writes of vCPUs need another source; join both with [`Combined`](super::Combined).
///
/// ```
/// use sterna_ram::dirty::AtomicBitmapLog;
/// use sterna_ram::{DirtyBitmaps, DirtySource, GuestRam};
/// use vm_memory::bitmap::AtomicBitmap;
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
/// let ram = GuestRam::from_guest_memory(&memory, |index, _| format!("ram{index}"))?;
/// let log = AtomicBitmapLog::new(&ram, &memory)?;
///
/// log.start()?;
/// memory.write_obj(7_u64, GuestAddress(0x5000))?;
///
/// let mut dirty = DirtyBitmaps::new(&ram);
/// log.sync(&mut dirty)?;
/// assert!(dirty.block(0).get(5) && dirty.count() == 1);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct AtomicBitmapLog {
    ram: GuestRam,
    /// Each entry is a block's index and the region that has its memory.
    regions: Vec<(usize, Arc<MmapRegion<AtomicBitmap>>)>,
    is_active: AtomicBool,
}

impl AtomicBitmapLog {
    /// Makes a log over all blocks of `ram`, which must be regions of `memory`
    /// ([`GuestRam::from_guest_memory`]). The log is not started.
    ///
    /// # Errors
    /// [`DirtyError::Range`] for a block that is no region of `memory`, or whose bitmap does not have one bit
    /// per 4 KiB page.
    pub fn new(ram: &GuestRam, memory: &GuestMemoryMmap<AtomicBitmap>) -> Result<Self, DirtyError> {
        let region_of = |(index, block): (usize, &RamBlock)| {
            let refuse = |rule| DirtyError::Range { origin: NAME, block: index, rule };
            let mut mappings = memory.iter().map(|region| region.get_mmap());
            let mapping = mappings
                .find(|mapping| mapping.as_ptr() == block.host_address())
                .ok_or_else(|| refuse("it is not a region of this guest memory"))?;
            if mapping.bitmap().len() as u64 != block.pages() {
                return Err(refuse("its bitmap does not have a bit for each page of 4 KiB"));
            }
            Ok((index, mapping))
        };
        let regions = ram.blocks().iter().enumerate().map(region_of).collect::<Result<_, _>>()?;
        Ok(Self { ram: ram.clone(), regions, is_active: AtomicBool::new(false) })
    }

    fn check_active(&self) -> Result<(), DirtyError> {
        let is_active = self.is_active.load(Ordering::SeqCst);
        is_active.then_some(()).ok_or(DirtyError::NotStarted { origin: NAME })
    }
}

impl DirtySource for AtomicBitmapLog {
    fn start(&self) -> Result<(), DirtyError> {
        if !self.is_active.load(Ordering::SeqCst) {
            // Writers set a bit after the write, so all present bits belong to writes before the start.
            self.regions.iter().for_each(|(_, region)| region.bitmap().reset());
            self.is_active.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        self.is_active.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.check_active()?;
        check_bitmaps(NAME, &self.ram, into)?;
        let began = Instant::now();
        let mut newly_dirty = 0;
        for (block, region) in &self.regions {
            newly_dirty += into.block_mut(*block).merge_words(0, &region.bitmap().get_and_reset());
        }
        let times = SyncTimes { aligned: began.elapsed(), ..SyncTimes::default() };
        Ok(SyncReport { newly_dirty, times })
    }

    /// Does nothing more than its checks, because syncing re-arms.
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.check_active()?;
        let pages = self.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}
