//! Finds and marks the pages that have failed.

use super::PoisonedPage;
use crate::bitmap::PageBitmap;
use crate::block::RamBlock;
use crate::error::RamError;
use crate::guest::GuestRam;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::sys;

impl RamBlock {
    /// States the guest-physical address of the block.
    ///
    /// Errors that name a page and dirty logs by guest addresses use it
    /// ([`ExternalLog`](crate::dirty::ExternalLog)).
    #[must_use]
    pub fn at_guest_address(mut self, address: u64) -> Self {
        self.guest_address = Some(address);
        self
    }

    /// Returns the guest-physical address of the block, if the VMM stated it.
    pub fn guest_address(&self) -> Option<u64> {
        self.guest_address
    }

    /// States that pages have failed, for example after a signal to the VMM.
    ///
    /// The same applies if the guest was informed of the failure. The VMM may call this at any time, also
    /// during a migration. Afterwards every access to these pages through this crate returns
    /// [`RamError::Poisoned`], and no migration of this guest begins or completes.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn mark_poisoned(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.poison.mark(first, count);
        Ok(())
    }

    /// States that pages are usable again, because they have other memory now.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`].
    pub fn clear_poisoned(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.poison.clear(first, count);
        Ok(())
    }

    /// Returns the pages that are known to have failed, in ascending order.
    pub fn poisoned(&self) -> Vec<PoisonedPage> {
        self.poison.pages.lock().iter().map(|page| self.poisoned_page(*page)).collect()
    }

    /// Returns the page at a host address, such as the address in a SIGBUS.
    ///
    /// `None` if the address is outside of the block.
    pub fn page_at(&self, host_address: usize) -> Option<u64> {
        let offset = host_address.checked_sub(self.host_address() as usize)? as u64;
        (self.check(offset, 1).is_ok()).then_some(offset >> PAGE_SHIFT)
    }

    pub(crate) fn poisoned_page(&self, page: u64) -> PoisonedPage {
        let offset = page << PAGE_SHIFT;
        let guest_address = self.guest_address.map(|address| address + offset);
        PoisonedPage { block: self.name().to_owned(), offset, guest_address }
    }

    /// Marks and returns the first of these pages that the kernel cannot read, if any.
    pub(crate) fn failed_in(&self, first: u64, count: u64) -> Option<RamError> {
        let probe = sys::Probe::new().ok()?;
        let address = |page: u64| self.host_address().wrapping_add((page * PAGE_BYTES) as usize).cast_const();
        let page =
            (first..first + count).find(|page| matches!(probe.can_read(&[address(*page)]), Ok(false)))?;
        Some(self.why_failed(page))
    }

    /// Returns the reason why an access to `page` failed.
    ///
    /// Either the file system has no space, or the page is poisoned. A poisoned page is marked.
    pub(crate) fn why_failed(&self, page: u64) -> RamError {
        let offset = page << PAGE_SHIFT;
        if let Some(source) = self.mapping.lacks_space(offset) {
            return RamError::NoSpace { block: self.name().to_owned(), offset, source };
        }
        self.poison.mark(page, 1);
        RamError::Poisoned { page: self.poisoned_page(page) }
    }

    /// Returns an error if the file system has no space for the first absent page.
    fn lacks_space(&self) -> Option<RamError> {
        let pages = self.pages().min(self.mapped_bytes() >> PAGE_SHIFT);
        let absent = PageBitmap::new(self.pages());
        self.mark_absent(0, pages, &absent).ok()?;
        let offset = absent.next_run(0, pages, 1)?.first << PAGE_SHIFT;
        let source = self.mapping.lacks_space(offset)?;
        Some(RamError::NoSpace { block: self.name().to_owned(), offset, source })
    }

    /// Marks the populated pages that the kernel cannot read.
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
    /// Returns all pages that are known to have failed.
    pub fn poisoned(&self) -> Vec<PoisonedPage> {
        self.blocks().iter().flat_map(RamBlock::poisoned).collect()
    }

    /// Returns block index and page at a host address, such as the address in a SIGBUS.
    pub fn page_at(&self, host_address: usize) -> Option<(usize, u64)> {
        self.blocks()
            .iter()
            .enumerate()
            .find_map(|(index, block)| Some((index, block.page_at(host_address)?)))
    }

    /// Returns the reason why an access to the page at `host_address` failed.
    ///
    /// With [`RamError::Poisoned`], the page is also marked, like by [`RamBlock::mark_poisoned`]. The other
    /// reason is [`RamError::NoSpace`]. `None` if the guest has no page at that address.
    pub fn why_failed_at(&self, host_address: usize) -> Option<RamError> {
        let (block, page) = self.page_at(host_address)?;
        Some(self.block(block).why_failed(page))
    }

    /// Finds the poisoned pages after an access to an unknown page failed.
    ///
    /// The kernel reads a byte of every populated page, and the unreadable pages are marked. The check raises
    /// no signal and takes about 0.2 µs per page.
    ///
    /// # Errors
    /// [`RamError::NoSpace`] if no page is poisoned and a block's file system has no space for an absent page;
    /// [`RamError::System`].
    pub fn find_poisoned(&self) -> Result<Vec<PoisonedPage>, RamError> {
        self.blocks().iter().try_for_each(RamBlock::probe)?;
        let poisoned = self.poisoned();
        if !poisoned.is_empty() {
            return Ok(poisoned);
        }
        self.blocks().iter().find_map(RamBlock::lacks_space).map_or(Ok(poisoned), Err)
    }
}
