//! Reads images: the index when an image is opened, then pages and files at random.

mod cache;
mod chain;
mod check;
mod content;
mod image;
mod open;
mod source;
mod stored_file;

pub(crate) use chain::link;
pub use chain::{Bases, FileBases, NoBases};
pub use check::{Checked, Damage};
pub use image::{PagePlace, StoredImage};
pub(crate) use source::FrameSource;
pub use stored_file::FileReader;
