//! The sources of a guest's memory.

mod cached_file;
mod image;
mod raw;
mod stored;

pub use image::ImageMemory;
pub use raw::RawMemory;
pub use stored::StoredMemory;

/// Length of a frame of sources that can read any page by itself: 64 KiB.
const FRAME_BYTES: u64 = 64 << 10;
