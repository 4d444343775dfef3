//! Pages of guest RAM that have failed: which they are, so that everybody keeps off them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{GuestRam, PAGE_BYTES, PAGE_SHIFT, PageBitmap, RamBlock, RamError, sys};
use parking_lot::Mutex;

/// A page of guest RAM that has failed: where it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoisonedPage {
    /// Its block's name.
    pub block: String,
    /// Its first byte, counted from the start of the block.
    pub offset: u64,
    /// Its guest-physical address, where the block was told its own ([`RamBlock::at_guest_address`]).
    pub guest_address: Option<u64>,
}

impl fmt::Display for PoisonedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {:#x} of block {:?}", self.offset, self.block)?;
        match self.guest_address {
            Some(address) => write!(f, " (guest address {address:#x})"),
            None => Ok(()),
        }
    }
}

/// The pages of a block that are known to have failed.
#[derive(Debug, Default)]
pub(crate) struct Poison {
    /// Whether there are any: nearly always not, which costs one load.
    any: AtomicBool,
    pages: Mutex<BTreeSet<u64>>,
}

impl Poison {
    /// The first that is known in `[first, end)`.
    #[inline]
    pub(crate) fn first_in(&self, first: u64, end: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.pages.lock().range(first..end.max(first)).next().copied()
    }

    fn mark(&self, first: u64, count: u64) {
        let mut pages = self.pages.lock();
        pages.extend(first..first + count);
        self.any.store(!pages.is_empty(), Ordering::Release);
    }

    pub(crate) fn clear(&self, first: u64, count: u64) {
        if self.any.load(Ordering::Acquire) {
            let mut pages = self.pages.lock();
            pages.retain(|page| !(first..first + count).contains(page));
            self.any.store(!pages.is_empty(), Ordering::Release);
        }
    }
}

impl RamBlock {
    /// States where the guest sees the block: for errors that name a page, and for dirty logs by guest addresses
    /// ([`ExternalLog`](crate::dirty::ExternalLog)).
    #[must_use]
    pub fn at_guest_address(mut self, address: u64) -> Self {
        self.guest_address = Some(address);
        self
    }

    /// Where the guest sees the block, if that was stated.
    pub fn guest_address(&self) -> Option<u64> {
        self.guest_address
    }

    /// States that pages have failed: the VMM was told so by a signal, or its guest was. May be called at any time,
    /// during a migration too. From now on every access to them through this crate is [`RamError::Poisoned`], and no
    /// migration of this guest begins or completes.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn mark_poisoned(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.poison.mark(first, count);
        Ok(())
    }

    /// States that pages are sound (again): other memory lies there now.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn clear_poisoned(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.poison.clear(first, count);
        Ok(())
    }

    /// The pages that are known to have failed, ascending.
    pub fn poisoned(&self) -> Vec<PoisonedPage> {
        self.poison.pages.lock().iter().map(|page| self.poisoned_page(*page)).collect()
    }

    /// The page that lies at this address of this process, as a signal tells it.
    pub fn page_at(&self, host_address: usize) -> Option<u64> {
        let offset = host_address.checked_sub(self.host_address() as usize)? as u64;
        (self.check(offset, 1).is_ok()).then_some(offset >> PAGE_SHIFT)
    }

    pub(crate) fn poisoned_page(&self, page: u64) -> PoisonedPage {
        let offset = page << PAGE_SHIFT;
        let guest_address = self.guest_address.map(|address| address + offset);
        PoisonedPage { block: self.name().to_owned(), offset, guest_address }
    }

    /// The first of these pages that the kernel cannot read, which is marked; `None` if it can read all.
    pub(crate) fn failed_in(&self, first: u64, count: u64) -> Option<RamError> {
        let probe = sys::Probe::new().ok()?;
        let address = |page: u64| self.host_address().wrapping_add((page * PAGE_BYTES) as usize).cast_const();
        let page =
            (first..first + count).find(|page| matches!(probe.can_read(&[address(*page)]), Ok(false)))?;
        self.poison.mark(page, 1);
        Some(RamError::Poisoned { page: self.poisoned_page(page) })
    }

    /// Marks the pages among those that are in memory which the kernel cannot read.
    fn probe(&self) -> Result<(), RamError> {
        const BATCH: usize = sys::PROBED_AT_ONCE;
        let pages = self.pages().min(self.mapped_bytes() >> PAGE_SHIFT);
        let absent = PageBitmap::new(self.pages());
        if self.mark_absent(0, pages, &absent).is_err() {
            absent.clear_all();
        }
        let failed =
            |source| RamError::System { block: self.name().to_owned(), call: "writev(pipe)", source };
        let probe = sys::Probe::new().map_err(failed)?;
        let address = |page: u64| self.host_address().wrapping_add((page * PAGE_BYTES) as usize).cast_const();
        let mut batch = Vec::with_capacity(BATCH);
        for page in 0..=pages {
            if page < pages && !absent.get(page) {
                batch.push(page);
            }
            if batch.len() < BATCH && page < pages {
                continue;
            }
            let addresses: Vec<_> = batch.iter().map(|page| address(*page)).collect();
            if !probe.can_read(&addresses).map_err(failed)? {
                for page in &batch {
                    if !probe.can_read(&[address(*page)]).map_err(failed)? {
                        self.poison.mark(*page, 1);
                    }
                }
            }
            batch.clear();
        }
        Ok(())
    }
}

impl GuestRam {
    /// All pages that are known to have failed.
    pub fn poisoned(&self) -> Vec<PoisonedPage> {
        self.blocks().iter().flat_map(RamBlock::poisoned).collect()
    }

    /// The block (its index) and the page that lie at this address of this process, as a signal tells it.
    pub fn page_at(&self, host_address: usize) -> Option<(usize, u64)> {
        self.blocks()
            .iter()
            .enumerate()
            .find_map(|(index, block)| Some((index, block.page_at(host_address)?)))
    }

    /// As [`RamBlock::mark_poisoned`] for the page that lies at this address of this process, which it names; `None` if
    /// no page of the guest's does.
    pub fn mark_poisoned_at(&self, host_address: usize) -> Option<PoisonedPage> {
        let (block, page) = self.page_at(host_address)?;
        let block = self.block(block);
        block.poison.mark(page, 1);
        Some(block.poisoned_page(page))
    }

    /// Has the kernel check every page that is in memory, and marks those that have failed. Raises no signal, takes
    /// some 0.2 µs a page; for when something has failed and the page is unknown.
    ///
    /// # Errors
    /// [`RamError::System`].
    pub fn find_poisoned(&self) -> Result<Vec<PoisonedPage>, RamError> {
        self.blocks().iter().try_for_each(RamBlock::probe)?;
        Ok(self.poisoned())
    }
}
