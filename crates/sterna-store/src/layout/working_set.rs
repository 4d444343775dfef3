//! The recorded working set (`specs/image.md §4.1`).

use super::bytes::{Fields, Rule};

/// Bytes of a range.
const RANGE_BYTES: usize = 16;
/// The largest number of ranges.
const RANGES_MOST: usize = 1 << 20;

/// Pages of one block of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRange {
    /// Index of the block.
    pub block: u32,
    /// Number of pages, at least 1.
    pub count: u32,
    /// The first page.
    pub first: u64,
}

/// Encodes the ranges, or the first million of them: a reader takes no more.
pub(super) fn encode(ranges: &[PageRange]) -> Vec<u8> {
    let mut out = Vec::with_capacity(ranges.len() * RANGE_BYTES);
    for range in ranges.iter().take(RANGES_MOST) {
        out.extend_from_slice(&range.block.to_le_bytes());
        out.extend_from_slice(&range.count.to_le_bytes());
        out.extend_from_slice(&range.first.to_le_bytes());
    }
    out
}

/// Decodes the ranges for blocks of RAM with these numbers of pages.
pub(super) fn decode(body: &[u8], ram: &[u64]) -> Result<Vec<PageRange>, Rule> {
    if body.len() > RANGES_MOST * RANGE_BYTES {
        return Err((format!("the working set has more than {RANGES_MOST} ranges"), "§4.1"));
    }
    let mut fields = Fields::new(body, "the working set");
    let mut ranges = Vec::with_capacity(body.len() / RANGE_BYTES);
    while !fields.is_empty() {
        ranges.push(PageRange { block: fields.u32()?, count: fields.u32()?, first: fields.u64()? });
    }
    check(&ranges, ram).map(|()| ranges)
}

/// Refuses ranges that are not pages of RAM.
pub(crate) fn check(ranges: &[PageRange], ram: &[u64]) -> Result<(), Rule> {
    let is_inside = |range: &PageRange| {
        let end = range.first.checked_add(range.count.into());
        range.count > 0
            && ram.get(range.block as usize).is_some_and(|pages| end.is_some_and(|end| end <= *pages))
    };
    match ranges.iter().find(|range| !is_inside(range)) {
        Some(PageRange { block, count, first }) => Err((
            format!("{count} pages of the working set from page {first} of block {block} on are not in RAM"),
            "§4.1",
        )),
        None => Ok(()),
    }
}
