//! Registered memory of the double, with detection of discarded pages.

use sterna_ram::{PAGE_SIZE, PageBitmap, RamFault};

use super::clock::Time;
use crate::rdma::{Access, Memory};

/// Size of the buffer for copies, in bytes.
const BOUNCE: usize = 64 << 10;

/// A registration: memory, its rights and its protection domain.
#[derive(Debug)]
pub(super) struct Region {
    /// The protection domain; numbers are unique over all hosts.
    pub(super) domain: usize,
    pub(super) memory: Memory,
    pub(super) access: Access,
    /// Virtual time when the registration was complete.
    pub(super) since: Time,
    /// Pages of the block that were found discarded. `None` if this cannot be detected, and with on-demand paging,
    /// which writes the present page.
    stale: Option<PageBitmap>,
}

/// Address range of a request's bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Region {
    /// Registers memory; populates it if `pins` is set.
    pub(super) fn new(domain: usize, memory: Memory, access: Access, pins: bool) -> Self {
        let stale = memory.block().filter(|_| pins).and_then(|(block, offset)| {
            let first = offset / PAGE_SIZE as u64;
            let last = (offset + memory.len() as u64).div_ceil(PAGE_SIZE as u64);
            // Memory that cannot be written is not populated either, so its pages are not tracked.
            block.populate(first, last - first).ok().map(|()| PageBitmap::new(block.pages()))
        });
        Self { domain, memory, access, since: Time::ZERO, stale }
    }

    pub(super) fn contains(&self, range: Range) -> bool {
        range.address.checked_sub(self.memory.address()).is_some_and(|from| {
            from.checked_add(range.len).is_some_and(|end| end <= self.memory.len() as u64)
        })
    }

    /// Whether a page of the range was discarded since the registration. The range must be inside; the result is
    /// permanent.
    pub(super) fn is_stale(&self, range: Range) -> bool {
        let (Some(stale), Some((block, offset))) = (&self.stale, self.memory.block()) else { return false };
        if range.len == 0 {
            return false;
        }
        let from = offset + (range.address - self.memory.address());
        let (first, last) = (from / PAGE_SIZE as u64, (from + range.len).div_ceil(PAGE_SIZE as u64));
        // If the kernel cannot report absent pages, no page counts as discarded.
        let _ = block.mark_absent(first, last - first, stale);
        (first..last).any(|page| stale.get(page))
    }

    /// As `is_stale`, for the whole region.
    pub(super) fn is_stale_anywhere(&self) -> bool {
        self.is_stale(Range { address: self.memory.address(), len: self.memory.len() as u64 })
    }

    /// Copies `len` bytes between two regions. Both ranges must be inside their region.
    pub(super) fn copy(from: (&Region, u64), to: (&Region, u64), len: u64) -> Result<(), RamFault> {
        let mut bounce = vec![0; BOUNCE.min(len as usize)];
        let mut done = 0;
        while done < len as usize {
            let piece = bounce.len().min(len as usize - done);
            let bytes = &mut bounce[..piece];
            if let Some(window) = from.0.window(from.1, done, piece) {
                window.copy_to(bytes)?;
            }
            if let Some(window) = to.0.window(to.1, done, piece) {
                window.copy_from(bytes)?;
            }
            done += piece;
        }
        Ok(())
    }

    fn window(&self, address: u64, from: usize, len: usize) -> Option<sterna_ram::RamSlice<'_>> {
        let start = usize::try_from(address.checked_sub(self.memory.address())?).ok()?;
        self.memory.slice().part(start + from, len)
    }
}
