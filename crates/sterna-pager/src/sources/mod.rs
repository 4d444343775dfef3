//! The sources of a guest's memory.

mod cached_file;
mod image;
mod raw;

pub use image::ImageMemory;
pub use raw::RawMemory;

/// Length of a frame of sources that can read any page by itself: 64 KiB.
const FRAME_BYTES: u64 = 64 << 10;
