//! The bytes of an image: header, index and footer (`specs/image.md §2 to §5`). Pure: no I/O.

pub(crate) mod bytes;
pub(crate) mod header;
pub(crate) mod index;
mod limits;
pub(crate) mod sections;
mod tables;
pub(crate) mod working_set;

pub(crate) use bytes::Rule;
pub(crate) use header::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, features};
pub use index::{Block, StoredFile};
pub(crate) use index::{FRAME_BYTES, FrameEntry, Index};
pub(crate) use limits::INDEX_MOST;
pub use limits::{EXTENT_LEAST, EXTENT_MOST, PAGE_BYTES};
pub(crate) use sections::Sections;
pub(crate) use tables::{Extent, ExtentTable};
pub use working_set::PageRange;
