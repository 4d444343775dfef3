//! The bytes of an image: header, index and footer (`specs/image.md §2 to §5`). Pure: no I/O.

pub(crate) mod bytes;
pub(crate) mod header;
pub(crate) mod index;
mod tables;

pub(crate) use bytes::Rule;
pub(crate) use header::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, features};
pub use index::{Block, StoredFile};
pub(crate) use index::{FRAME_BYTES, FrameEntry, Index};
pub(crate) use tables::{Extent, ExtentTable};

/// Limit of an index in bytes: that of 1 TiB in extents of 64 KiB.
pub(crate) const INDEX_MOST: u64 = 1 << 30;
/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// The shortest extent in bytes.
pub const EXTENT_LEAST: u32 = 64 << 10;
/// The longest extent in bytes.
pub const EXTENT_MOST: u32 = 2 << 20;
