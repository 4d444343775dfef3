//! Making pages zero, and giving memory back where that is permitted.

use crate::mapping::NotDiscarded;
use crate::{PAGE_BYTES, PAGE_SHIFT, RamBlock, RamError, absent};

/// From this many pages on, making a range zero gives its memory back instead of storing zeros.
const DISCARD_PAGES: u64 = 256;

/// How a block became all zero.
#[derive(Debug)]
pub enum Emptied {
    /// Its memory was given back.
    Freed,
    /// The memory could not be given back, for this reason; zeros were stored.
    Zeroed(RamError),
}

impl RamBlock {
    /// Makes pages read as zero. Long ranges give their memory back where that is permitted and no page is
    /// [pinned](RamBlock::pin); otherwise each page that is
    /// populated is compared, and written if it is not zero. Nothing is populated by this.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::ReadOnly`], [`RamError::System`].
    pub fn zero_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.zero(first, count, Self::store_zeros)
    }

    /// As [`RamBlock::zero_pages`], of pages that are known to be in memory: the kernel is not asked which
    /// are, and one that is not may be populated.
    ///
    /// # Errors
    /// As [`RamBlock::zero_pages`].
    pub fn zero_present_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.zero(first, count, |block, first, count| block.store_zeros_into(first..first + count))
    }

    /// Gives all memory back: the block is as fresh as when it was made.
    ///
    /// # Errors
    /// [`RamError::NotPermitted`] for memory of a VMM that does not permit it; nothing has changed then.
    /// [`RamError::Pinned`]; nothing has changed then, either. [`RamError::System`]; the bytes are then anything. [`RamBlock::empty`] does not depend on the kernel's leave.
    pub fn discard_all(&self) -> Result<(), RamError> {
        let pages = self.mapped_bytes() >> PAGE_SHIFT;
        let (inner, end) = self.whole_units(0, pages);
        self.discard(inner, end - inner)?;
        self.store_zeros(0, inner)?;
        self.store_zeros(end, pages - end)
    }

    /// Makes all bytes zero: gives the memory back, or where that is not permitted, a page is [pinned](RamBlock::pin), or
    /// the kernel refuses it (locked memory before Linux 5.18, a sandbox), stores zeros.
    ///
    /// # Errors
    /// [`RamError`], if zeros cannot be stored either; the bytes are then anything.
    pub fn empty(&self) -> Result<Emptied, RamError> {
        self.check_writable()?;
        match self.discard_all() {
            Ok(()) => Ok(Emptied::Freed),
            Err(why) => {
                self.store_zeros(0, self.mapped_bytes() >> PAGE_SHIFT)?;
                Ok(Emptied::Zeroed(why))
            }
        }
    }

    /// Gives the memory of pages back, whole pages of the memory below: no page is there afterwards.
    pub(crate) fn discard_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.discard(first, count)
    }

    fn zero(
        &self,
        first: u64,
        count: u64,
        store_zeros: impl Fn(&Self, u64, u64) -> Result<(), RamError>,
    ) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.check_writable()?;
        let (inner, inner_end) = self.whole_units(first, count);
        if count < DISCARD_PAGES || !self.permissions().discard || inner == inner_end {
            return store_zeros(self, first, count);
        }
        store_zeros(self, first, inner - first)?;
        if self.discard(inner, inner_end - inner).is_err() {
            // Then the memory stays, but what it holds must not.
            store_zeros(self, inner, inner_end - inner)?;
        }
        store_zeros(self, inner_end, first + count - inner_end)
    }

    /// The part of a range, first page and end, that is made of whole pages of the memory below; perhaps none. A block of
    /// the VMM's may begin and end inside of a huge page.
    fn whole_units(&self, first: u64, count: u64) -> (u64, u64) {
        let unit = self.page_bytes() >> PAGE_SHIFT;
        let before = (self.host_address() as u64 >> PAGE_SHIFT) % unit;
        let inner = (first + before).next_multiple_of(unit) - before;
        let end = ((first + before + count) / unit * unit).saturating_sub(before);
        if inner < end { (inner, end) } else { (first, first) }
    }

    /// Stores zeros into the pages that are populated and not zero yet.
    fn store_zeros(&self, first: u64, count: u64) -> Result<(), RamError> {
        let mut holes = Vec::new();
        if absent::holes(self, first, count, &mut |first, count| holes.push((first, count))).is_err() {
            // It is unknown what is there, so every page is looked at.
            holes.clear();
        }
        holes.push((first + count, 0));
        let mut next = first;
        for (hole, hole_count) in holes {
            self.store_zeros_into(next..hole)?;
            next = hole + hole_count;
        }
        Ok(())
    }

    /// Compares each page and stores zeros where it is not zero.
    fn store_zeros_into(&self, pages: std::ops::Range<u64>) -> Result<(), RamError> {
        for page in pages {
            let window = self.page(page)?;
            let is_zero = window.is_zero().map_err(|fault| self.failed(fault, page))?;
            if !is_zero {
                window.fill_zero().map_err(|fault| self.failed(fault, page))?;
            }
        }
        Ok(())
    }

    fn discard(&self, first: u64, count: u64) -> Result<(), RamError> {
        if !self.permissions().discard {
            return Err(RamError::NotPermitted {
                block: self.name().to_owned(),
                action: "give back memory of",
            });
        }
        self.mapping.discard(first * PAGE_BYTES, count * PAGE_BYTES).map_err(|why| match why {
            NotDiscarded::Pinned { offset, len } => {
                RamError::Pinned { block: self.name().to_owned(), offset, len }
            }
            NotDiscarded::ReadOnly => RamError::ReadOnly { block: self.name().to_owned() },
            NotDiscarded::System(call, source) => self.system(call, source),
        })?;
        // Pages that have failed went with the rest; the kernel does not give them again.
        self.poison.clear(first, count);
        Ok(())
    }
}
