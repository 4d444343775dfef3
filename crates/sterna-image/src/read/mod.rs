//! Reads images: first everything except the pages, then the pages.
//!
//! [`Image::open`] detects the format, reads the head and the end of the stream, and checks the rules of
//! `specs/mapped-ram.md §8`. It reads no page of a mapped-ram image. It walks through a legacy stream once, front to
//! back, because the devices come after the pages.

pub(crate) mod begun;
pub(crate) mod body;
mod cursor;
mod device;
pub(crate) mod half_repaired;
pub(crate) mod head;
pub(crate) mod image;
mod libvirt;
pub(crate) mod mapped;
mod opaque;
mod places;
mod preview;
mod regions;
mod source;
mod tail;
pub(crate) mod tee;

pub use image::Image;
pub use mapped::{MappedBlock, MappedPages};
pub use places::PagePlaces;
pub use preview::Preview;
pub use source::{ReadAt, Stamp};

use crate::error::ImageError;

/// Receives the pages of an image.
pub trait PageVisitor {
    /// Receives pages of block `block` from page `first`; `content` is a whole number of pages.
    ///
    /// # Errors
    /// An error of the visitor. It ends the visit.
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError>;

    /// Receives `count` zero pages from page `first`.
    ///
    /// # Errors
    /// An error of the visitor. It ends the visit.
    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError>;
}
