//! The sources of a guest's memory.

mod cached_file;
mod image;
mod raw;
mod stored;

pub use image::ImageMemory;
pub use raw::RawMemory;
pub use stored::StoredMemory;
