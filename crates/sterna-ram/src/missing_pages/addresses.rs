//! Host addresses of pages.

use std::ops::Range;

use crate::missing_pages::error::MissingPagesError;
use crate::page::PAGE_SHIFT;
use crate::{GuestRam, RamBlock};

/// Returns the addresses of these pages, which must be whole pages of the backing.
pub(super) fn checked(
    ram: &GuestRam,
    block: usize,
    first: u64,
    count: u64,
) -> Result<Range<u64>, MissingPagesError> {
    let outside = || MissingPagesError::Outside { block, first, count };
    let found = ram.blocks().get(block).ok_or_else(outside)?;
    found.check_pages(first, count).map_err(|_| outside())?;
    let unit = found.page_bytes() >> PAGE_SHIFT;
    if count == 0 || !first.is_multiple_of(unit) || !count.is_multiple_of(unit) {
        return Err(outside());
    }
    Ok(bytes_of(found, first, count))
}

pub(super) fn bytes_of(block: &RamBlock, first: u64, count: u64) -> Range<u64> {
    let start = block.host_address() as u64 + (first << PAGE_SHIFT);
    start..start + (count << PAGE_SHIFT)
}
