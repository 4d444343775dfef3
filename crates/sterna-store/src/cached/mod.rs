//! Ranges of remote objects, kept in memory and in a directory.
//!
//! A remote object is read in blocks of 256 KiB. Threads that need the same block fetch it once. Blocks that are read in their
//! order are fetched several in one request. The directory is shared by the processes of a host.

mod directory;
mod memory;
mod objects;
mod ranges;

pub use objects::CachedObjects;
pub use ranges::{CacheOptions, RangeCache};
