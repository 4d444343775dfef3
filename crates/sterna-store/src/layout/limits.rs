//! Sizes and limits of the format (`specs/image.md §2`).

/// Limit of an index in bytes: that of 1 TiB in extents of 64 KiB.
pub(crate) const INDEX_MOST: u64 = 1 << 30;
/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// The shortest extent in bytes.
pub const EXTENT_LEAST: u32 = 64 << 10;
/// The longest extent in bytes.
pub const EXTENT_MOST: u32 = 2 << 20;
