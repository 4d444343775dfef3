//! Reading images: what they are, all of them but their pages, and then the pages.
//!
//! [`Image::open`] sniffs the file, reads the head and the end of the stream, and checks the rules of
//! `specs/mapped-ram.md §8`. Of a mapped-ram image no page is read; a legacy stream has to be walked once,
//! front to back, since its devices lie behind its pages.

pub(crate) mod begun;
pub(crate) mod body;
mod cursor;
pub(crate) mod half_repaired;
pub(crate) mod head;
pub(crate) mod image;
mod libvirt;
pub(crate) mod mapped;
mod opaque;
mod places;
mod preview;
mod regions;
mod sniff;
mod source;
mod tail;
pub(crate) mod tee;

pub use image::Image;
pub use mapped::{MappedBlock, MappedPages};
pub use places::PagePlaces;
pub use preview::Preview;
pub use source::{ReadAt, Stamp};

use crate::ImageError;

/// Takes the pages of an image.
pub trait PageVisitor {
    /// Pages of block `block` from page `first` on; `content` is a whole number of pages.
    ///
    /// # Errors
    /// Whatever stops the visit.
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError>;

    /// `count` pages from page `first` on are zero.
    ///
    /// # Errors
    /// Whatever stops the visit.
    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError>;
}
