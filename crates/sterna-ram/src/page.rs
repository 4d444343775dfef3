//! Sizes of a page.

/// Bytes in a page of the migration format on x86-64 (specs/stream.md §2), also on huge pages. For lengths of buffers;
/// see [`PAGE_BYTES`] for offsets.
pub const PAGE_SIZE: usize = 4096;

/// Binary logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Bytes in a page, in the type of every offset, length, count and page size of this crate: `u64`.
pub const PAGE_BYTES: u64 = PAGE_SIZE as u64;
