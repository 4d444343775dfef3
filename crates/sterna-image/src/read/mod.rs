//! Reads images: first everything except the pages, then the pages.
//!
//! [`Image::open`] detects the format, reads the head and the end of the stream, and checks the rules of
//! `specs/mapped-ram.md §8`. It reads no page of a mapped-ram image. It walks through a legacy stream once, front to
//! back, because the devices come after the pages.

pub(crate) mod begun;
pub(crate) mod body;
mod cursor;
mod device;
pub(crate) mod framed;
pub(crate) mod half_repaired;
pub(crate) mod head;
pub(crate) mod image;
mod libvirt;
pub(crate) mod mapped;
mod opaque;
pub(crate) mod open;
mod places;
mod preview;
mod regions;
mod source;
mod tail;
pub(crate) mod tee;
pub(crate) mod visitor;

pub use framed::Access;
pub use image::Image;
pub use mapped::{MappedBlock, MappedPages};
pub use open::open_stored;
pub use places::PagePlaces;
pub use preview::Preview;
pub use source::{ReadAt, Stamp};
pub use visitor::PageVisitor;
