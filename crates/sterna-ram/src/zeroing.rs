//! Makes pages zero, and gives memory back where the VMM permits it.

use crate::absent;
use crate::block::RamBlock;
use crate::error::RamError;
use crate::mapping::NotDiscarded;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};

/// Minimum of pages (1 MiB) for which a range is given back instead of zeroed.
const DISCARD_PAGES: u64 = 256;

/// The way in which a block became zero.
#[derive(Debug)]
pub enum Emptied {
    /// The memory was given back to the kernel.
    Freed,
    /// Zeros were stored, because the memory could not be given back for this reason.
    Zeroed(RamError),
}

impl RamBlock {
    /// Makes pages read as zero without populating any page.
    ///
    /// Long ranges are given back to the kernel if that is permitted and no page is [pinned](RamBlock::pin).
    /// Otherwise each populated page is compared, and written if it is not zero.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::ReadOnly`], [`RamError::System`].
    pub fn zero_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.zero(first, count, Self::store_zeros)
    }

    /// Makes pages zero that are known to be populated, like [`RamBlock::zero_pages`].
    ///
    /// The kernel is not asked which pages are populated, so an absent page may be populated.
    ///
    /// # Errors
    /// The errors of [`RamBlock::zero_pages`].
    pub fn zero_present_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.zero(first, count, |block, first, count| block.store_zeros_into(first..first + count))
    }

    /// Gives all memory back to the kernel: the block is in its initial state afterwards.
    ///
    /// [`RamBlock::empty`] also works if the kernel refuses.
    ///
    /// # Errors
    /// - [`RamError::NotPermitted`] for memory of a VMM that does not permit it; nothing has changed then.
    /// - [`RamError::Pinned`]; nothing has changed then, either.
    /// - [`RamError::System`]; the bytes are undefined then.
    pub fn discard_all(&self) -> Result<(), RamError> {
        let pages = self.mapped_bytes() >> PAGE_SHIFT;
        let (inner, end) = self.whole_units(0, pages);
        self.discard(inner, end - inner)?;
        self.store_zeros(0, inner)?;
        self.store_zeros(end, pages - end)
    }

    /// Makes all bytes zero, by giving the memory back or by storing zeros.
    ///
    /// Zeros are stored if discarding is not permitted or a page is [pinned](RamBlock::pin). They are also
    /// stored if the kernel refuses to discard (locked memory before Linux 5.18, a sandbox).
    ///
    /// # Errors
    /// [`RamError`], if zeros cannot be stored either; the bytes are undefined then.
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

    /// Gives whole pages of the backing back to the kernel. They read as zero afterwards.
    ///
    /// A VMM calls it when its guest's balloon grows. No dirty source reports the change, so the caller must
    /// report it to one afterwards, like a write.
    ///
    /// # Errors
    /// - [`RamError::OutOfRange`], [`RamError::NotPermitted`], [`RamError::Pinned`], [`RamError::ReadOnly`];
    ///   nothing has changed then.
    /// - [`RamError::System`]; the bytes are undefined then.
    pub fn discard_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
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
            // The kernel keeps the memory, so its content must be overwritten.
            store_zeros(self, inner, inner_end - inner)?;
        }
        store_zeros(self, inner_end, first + count - inner_end)
    }

    /// Returns first page and end of the part made of whole pages of the backing.
    ///
    /// The part may be empty. A block of the VMM's memory may begin and end inside of a huge page.
    fn whole_units(&self, first: u64, count: u64) -> (u64, u64) {
        let unit = self.page_bytes() >> PAGE_SHIFT;
        let before = (self.host_address() as u64 >> PAGE_SHIFT) % unit;
        let inner = (first + before).next_multiple_of(unit) - before;
        let end = ((first + before + count) / unit * unit).saturating_sub(before);
        if inner < end { (inner, end) } else { (first, first) }
    }

    /// Stores zeros into the populated pages that are not zero yet.
    fn store_zeros(&self, first: u64, count: u64) -> Result<(), RamError> {
        let mut holes = Vec::new();
        if absent::holes(self, first, count, &mut |first, count| holes.push((first, count))).is_err() {
            // The populated pages are unknown, so every page is compared.
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

    /// Compares each page with zero, and stores zeros where it differs.
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
                action: "release memory of",
            });
        }
        self.mapping.discard(first * PAGE_BYTES, count * PAGE_BYTES).map_err(|why| match why {
            NotDiscarded::Pinned { offset, len } => {
                RamError::Pinned { block: self.name().to_owned(), offset, len }
            }
            NotDiscarded::ReadOnly => RamError::ReadOnly { block: self.name().to_owned() },
            NotDiscarded::System(call, source) => self.system(call, source),
        })?;
        // Discarding also frees failed pages, and the kernel does not allocate them again.
        self.poison.clear(first, count);
        Ok(())
    }
}
