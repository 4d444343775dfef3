//! Sizes of a page.

/// Bytes in a page of the migration format on x86-64 (specs/stream.md §2), also on huge pages.
pub const PAGE_SIZE: usize = 4096;

/// Binary logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// [`PAGE_SIZE`] in the integer type of offsets.
pub(crate) const PAGE_BYTES: u64 = PAGE_SIZE as u64;
