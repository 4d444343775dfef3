//! Images of virtual machines: the mapped-ram form, as far as the engine's file writer needs it.
//!
//! In a mapped-ram image every page has a fixed place, so lanes write in any order and in parallel, and a
//! bitmap per block says which pages are there (specs/mapped-ram.md). [`MappedRam`] is the RAM section of
//! such an image: it places blocks, takes pages, and writes the bitmaps last.
#![forbid(unsafe_code)]

mod mapped;

pub use mapped::{ImageError, MappedRam};
